"""The Redis users of deploy/redis, made from the table of keys: `python -m blockrelay.redis.users control|payload`.

A script runs with the rights of its caller, so a role may use what it uses itself and what its scripts use.
"""

import sys

from blockrelay.protocol.keys import FAMILIES, SCRIPTS_OF, Family, Keys, Server

#: The cell of the files; people replace it by theirs.
CELL = "c0"
#: What tells a client that it has found the master of Sentinels, or the node of a cluster.
_PLACE = "+role +cluster|slots"
_ALL = f"-@all +@read +@write +@connection +@transaction +eval +evalsha +time -@dangerous +info -@admin {_PLACE}"
#: A gateway only reads results on the payload Redis, and lets them go; everybody else writes.
_COMMANDS = {("payload", "gateway"): f"-@all +@read +@connection +getex -@dangerous +info {_PLACE}"}
#: Status events, on the control Redis.
_CHANNEL = f"&{Keys(CELL).status_channel}"
_CHANNELS = {
    ("control", "gateway"): f" {_CHANNEL} +subscribe +unsubscribe",
    ("control", "worker"): f" {_CHANNEL} +publish",
}


def _pattern(family: Family) -> str:
    return f"~{{{CELL}}}:{family.name}{':*' if family.of else ''}"


def families_of(role: str, server: Server) -> list[Family]:
    """What `role` has a right to on that server. Scripts run on the control Redis only."""
    needs = {role, *(SCRIPTS_OF[role] if server == "control" else ())}
    return [family for family in FAMILIES if server == family.server and needs & family.users]


def rules(server: Server) -> list[str]:
    """The lines of the ACL file; ROLE_SHA256 stands for the digest of the role's password."""
    lines = ["user default off"]
    for role in SCRIPTS_OF:
        commands = _COMMANDS.get((server, role), _ALL)
        channels = _CHANNELS.get((server, role), "")
        patterns = " ".join(_pattern(family) for family in families_of(role, server))
        lines.append(f"user {role} on #{role.upper()}_SHA256 resetchannels {commands} {patterns}{channels}")
    return lines


if __name__ == "__main__":
    for _server in ("control", "payload"):
        if sys.argv[1:] == [_server]:
            sys.stdout.write("\n".join(rules(_server)) + "\n")
            break
    else:
        sys.exit("usage: python -m blockrelay.redis.users control|payload")
