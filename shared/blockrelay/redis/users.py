"""The Redis users of deploy/redis, made from the table of keys: `python -m blockrelay.redis.users FILE`, where FILE is
control or payload, or replication (lines that control servers with replicas have too) or sentinel.

A script runs with the rights of its caller, so a role may use what it uses itself and what its scripts use. Beside the
services there are `keda`, an autoscaler that may count the unfinished requests, `exporter`, which tells a monitoring
system how the server is, `reloader`, who has the server read its file of users again, and `probe`, who needs no
password and may ask whether the server answers.
"""

import sys
from collections.abc import Mapping

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
#: INFO says all that dashboards and alerts ask for. CONFIG has passwords, SLOWLOG has prompts.
_EXPORTER = "-@all +ping +info"
#: Nobody can come as the user `default`: it has no password and is off. It has every right nevertheless, because a
#: server that reads its append-only file again (Redis 7.0 and Valkey 8.0 were seen to, 6.2 was not) runs what is
#: between MULTI and EXEC as this user, and leaves out what it may not do: all that scripts have written would be gone.
DEFAULT_USER = "user default off resetpass ~* &* +@all"
#: Passwords are changed in the file; who may say so learns nothing of it.
_RELOADER = "-@all +ping +acl|load"
_PROBE = "user probe on nopass resetchannels -@all +ping"
#: Who does what where a control Redis fails over: on its servers a replica copies the master, and Sentinels watch and
#: replace it; on Sentinels services and KEDA ask for the master, and Sentinels ask each other.
_HELLO = "&__sentinel__:hello"
REPLICATION = {
    "replica": "resetchannels -@all +ping +psync +replconf",
    "sentinel": f"resetchannels {_HELLO} -@all +ping +info +role +subscribe +publish +multi +exec +slaveof "
    "+config|rewrite +client|setname +client|kill +script|kill",
}
SENTINEL = {
    "reader": "resetchannels -@all +ping +sentinel|masters +sentinel|get-master-addr-by-name",
    "keda": "resetchannels &* -@all +ping +hello +subscribe +sentinel|get-master-addr-by-name +sentinel|sentinels "
    "+sentinel|replicas",
    "peer": f"resetchannels {_HELLO} -@all +ping +publish +client|setname +sentinel|is-master-down-by-addr",
    "reloader": f"resetchannels {_RELOADER}",
}
#: Users with a password: ROLE_SHA256 of the files stands for its digest.
ROLES = (*SCRIPTS_OF, "keda", "exporter", "reloader")


def _pattern(family: Family) -> str:
    return f"~{{{CELL}}}:{family.name}{':*' if family.of else ''}"


def families_of(role: str, server: Server) -> list[Family]:
    """What `role` has a right to on that server. Scripts run on the control Redis only."""
    needs = {role, *(SCRIPTS_OF[role] if server == "control" else ())}
    return [family for family in FAMILIES if server == family.server and needs & family.users]


def rules(server: Server) -> list[str]:
    """The lines of the ACL file; ROLE_SHA256 stands for the digest of the role's password."""
    lines = [DEFAULT_USER, _PROBE]
    for role in SCRIPTS_OF:
        commands = _COMMANDS.get((server, role), _ALL)
        channels = _CHANNELS.get((server, role), "")
        patterns = " ".join(_pattern(family) for family in families_of(role, server))
        lines.append(f"user {role} on #{role.upper()}_SHA256 resetchannels {commands} {patterns}{channels}")
    if server == "control":
        lines.append(f"user keda on #KEDA_SHA256 resetchannels {_KEDA}")
    lines.append(f"user exporter on #EXPORTER_SHA256 resetchannels {_EXPORTER}")
    lines.append(f"user reloader on #RELOADER_SHA256 resetchannels {_RELOADER}")
    return lines


def _with_passwords(users: Mapping[str, str]) -> list[str]:
    return [f"user {name} on #{name.upper()}_SHA256 {rights}" for name, rights in users.items()]


def files() -> dict[str, list[str]]:
    """Name of each file -> its lines."""
    sentinel = ["user default off", _PROBE, *_with_passwords(SENTINEL)]
    return {
        "control": rules("control"),
        "payload": rules("payload"),
        "replication": _with_passwords(REPLICATION),
        "sentinel": sentinel,
    }


if __name__ == "__main__":
    for _name, _lines in files().items():
        if sys.argv[1:] == [_name]:
            sys.stdout.write("\n".join(_lines) + "\n")
            break
    else:
        sys.exit("usage: python -m blockrelay.redis.users control|payload|replication|sentinel")
