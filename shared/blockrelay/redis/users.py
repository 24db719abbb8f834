"""The Redis users of deploy/redis, made from the table of keys: `python -m blockrelay.redis.users control|payload`.

A script runs with the rights of its caller, so a role may use what it uses itself and what its scripts use. Beside the
services there are `keda`, an autoscaler that may count the unfinished requests, `reloader`, who has the server read its
file of users again, and `probe`, who needs no password and may ask whether the server answers.
"""

import sys

from blockrelay.protocol.keys import FAMILIES, SCRIPTS_OF, Family, Keys, Server

#: The cell of the files; people replace it by theirs.
CELL = "c0"
#: What tells a client that it has found the master of Sentinels, or the node of a cluster.
_PLACE = "+role +cluster|slots"
_ALL = f"-@all +@read +@write +@connection +@transaction +eval +evalsha +time -@dangerous +info -@admin {_PLACE}"
#: A gateway reads results on the payload Redis and lets them go, and writes the KV that clients give; everybody else
#: writes.
_GIVES = "+hset +expire +unlink +multi +exec"
_COMMANDS = {("payload", "gateway"): f"-@all +@read +@connection +getex {_GIVES} -@dangerous +info {_PLACE}"}
#: Status events, on the control Redis.
_CHANNEL = f"&{Keys(CELL).status_channel}"
_CHANNELS = {
    ("control", "gateway"): f" {_CHANNEL} +subscribe +unsubscribe",
    ("control", "worker"): f" {_CHANNEL} +publish",
}
#: What KEDA's `redis` trigger sends: a script with TYPE and the length of that type. EVAL asks for the right to write.
_KEDA = f"-@all +ping +hello +eval +type +zcard +llen ~{Keys(CELL).running}"
#: Nobody can come as the user `default`: it has no password and is off. It has every right nevertheless, because a
#: server that reads its append-only file again (Redis 7.0 and Valkey 8.0 were seen to, 6.2 was not) runs what is
#: between MULTI and EXEC as this user, and leaves out what it may not do: all that scripts have written would be gone.
DEFAULT_USER = "user default off resetpass ~* &* +@all"
#: Passwords are changed in the file; who may say so learns nothing of it.
_RELOADER = "-@all +ping +acl|load"
#: Users with a password: ROLE_SHA256 of the files stands for its digest.
ROLES = (*SCRIPTS_OF, "keda", "reloader")


def _pattern(family: Family) -> str:
    return f"~{{{CELL}}}:{family.name}{':*' if family.of else ''}"


def families_of(role: str, server: Server) -> list[Family]:
    """What `role` has a right to on that server. Scripts run on the control Redis only."""
    needs = {role, *(SCRIPTS_OF[role] if server == "control" else ())}
    return [family for family in FAMILIES if server == family.server and needs & family.users]


def rules(server: Server) -> list[str]:
    """The lines of the ACL file; ROLE_SHA256 stands for the digest of the role's password."""
    lines = [DEFAULT_USER, "user probe on nopass resetchannels -@all +ping"]
    for role in SCRIPTS_OF:
        commands = _COMMANDS.get((server, role), _ALL)
        channels = _CHANNELS.get((server, role), "")
        patterns = " ".join(_pattern(family) for family in families_of(role, server))
        lines.append(f"user {role} on #{role.upper()}_SHA256 resetchannels {commands} {patterns}{channels}")
    if server == "control":
        lines.append(f"user keda on #KEDA_SHA256 resetchannels {_KEDA}")
    lines.append(f"user reloader on #RELOADER_SHA256 resetchannels {_RELOADER}")
    return lines


if __name__ == "__main__":
    for _server in ("control", "payload"):
        if sys.argv[1:] == [_server]:
            sys.stdout.write("\n".join(rules(_server)) + "\n")
            break
    else:
        sys.exit("usage: python -m blockrelay.redis.users control|payload")
