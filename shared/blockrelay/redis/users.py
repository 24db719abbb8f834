"""Makes the Redis users of deploy/redis (ACL files) from the table of keys.

`python -m blockrelay.redis.users FILE` prints a file: control, payload, sentinel, or replication (further lines for
control servers with replicas).

A script runs with the rights of its caller, so a service has rights to the keys that it uses and those of its scripts.
Other users: `keda`, an autoscaler that may count the unfinished requests; `exporter`, which reads the server's state
for monitoring; `reloader`, which makes the server read its file of users again; `probe`, which needs no password and
may only ping.
"""

import sys
from collections.abc import Mapping

from blockrelay.protocol.keys import FAMILIES, SCRIPTS_OF, Family, Keys, Server

#: The cell in the files; operators replace it by theirs.
CELL = "c0"
#: Commands by which a client checks that it has found a master, or the right node of a cluster.
_PLACE = "+role +cluster|slots"
_ALL = f"-@all +@read +@write +@connection +@transaction +eval +evalsha +time -@dangerous +info -@admin {_PLACE}"
#: Commands with which a gateway stores KV from clients on the payload Redis, and deletes it.
_GIVES = "+hset +expire +unlink +multi +exec"
#: Commands of a service on a server, where they are fewer than _ALL: a gateway mostly reads on the payload Redis.
_COMMANDS = {("payload", "gateway"): f"-@all +@read +@connection +getex {_GIVES} -@dangerous +info {_PLACE}"}
#: The channel of status events, on the control Redis.
_CHANNEL = f"&{Keys(CELL).status_channel}"
_CHANNELS = {
    ("control", "gateway"): f" {_CHANNEL} +subscribe +unsubscribe",
    ("control", "worker"): f" {_CHANNEL} +publish",
}
#: Rights for KEDA's `redis` trigger, which runs a script with TYPE and ZCARD or LLEN. EVAL needs the right to write.
_KEDA = f"-@all +ping +hello +eval +type +zcard +llen ~{Keys(CELL).running}"
#: INFO has all that dashboards and alerts need. CONFIG would show passwords, and SLOWLOG prompts.
_EXPORTER = "-@all +ping +info"
#: The user `default` cannot log in: it has no password and is off. It has all rights, because a server that reads its
#: append-only file (seen with Redis 7.0 and Valkey 8.0, not with 6.2) runs the commands between MULTI and EXEC as this
#: user, and skips those that it may not run: all writes of scripts would be lost.
DEFAULT_USER = "user default off resetpass ~* &* +@all"
#: Passwords are changed in the file; this user can make the server read it, but not see it.
_RELOADER = "-@all +ping +acl|load"
_PROBE = "user probe on nopass resetchannels -@all +ping"
#: The channel on which Sentinels find each other.
_HELLO = "&__sentinel__:hello"
#: Users of a control Redis that fails over: a replica copies the master; Sentinels watch it and replace it.
REPLICATION = {
    "replica": "resetchannels -@all +ping +psync +replconf",
    "sentinel": f"resetchannels {_HELLO} -@all +ping +info +role +subscribe +publish +multi +exec +slaveof "
    "+config|rewrite +client|setname +client|kill +script|kill",
}
#: Users of the Sentinels: services and KEDA ask for the master; Sentinels ask each other.
SENTINEL = {
    "reader": "resetchannels -@all +ping +sentinel|masters +sentinel|get-master-addr-by-name",
    "keda": "resetchannels &* -@all +ping +hello +subscribe +sentinel|get-master-addr-by-name +sentinel|sentinels "
    "+sentinel|replicas",
    "peer": f"resetchannels {_HELLO} -@all +ping +publish +client|setname +sentinel|is-master-down-by-addr",
    "reloader": f"resetchannels {_RELOADER}",
}
#: Users with a password in the files control and payload: ROLE_SHA256 there stands for its digest.
ROLES = (*SCRIPTS_OF, "keda", "exporter", "reloader")


def _pattern(family: Family) -> str:
    return f"~{{{CELL}}}:{family.name}{':*' if family.of else ''}"


def families_of(role: str, server: Server) -> list[Family]:
    """Returns the key families that `role`, a service of SCRIPTS_OF, may use on that server.

    Scripts run on the control Redis only.
    """
    needs = {role, *(SCRIPTS_OF[role] if server == "control" else ())}
    return [family for family in FAMILIES if server == family.server and needs & family.users]


def rules(server: Server) -> list[str]:
    """Returns the lines of a server's ACL file; ROLE_SHA256 stands for the digest of the role's password."""
    users: dict[str, str] = {}
    for role in SCRIPTS_OF:
        commands = _COMMANDS.get((server, role), _ALL)
        channels = _CHANNELS.get((server, role), "")
        patterns = " ".join(_pattern(family) for family in families_of(role, server))
        users[role] = f"resetchannels {commands} {patterns}{channels}"
    if server == "control":
        users["keda"] = f"resetchannels {_KEDA}"
    users |= {"exporter": f"resetchannels {_EXPORTER}", "reloader": f"resetchannels {_RELOADER}"}
    return [DEFAULT_USER, _PROBE, *_with_passwords(users)]


def _with_passwords(users: Mapping[str, str]) -> list[str]:
    return [f"user {name} on #{name.upper()}_SHA256 {rights}" for name, rights in users.items()]


def files() -> dict[str, list[str]]:
    """Returns the lines of each file, by its name."""
    return {
        "control": rules("control"),
        "payload": rules("payload"),
        "replication": _with_passwords(REPLICATION),
        "sentinel": ["user default off", _PROBE, *_with_passwords(SENTINEL)],
    }


if __name__ == "__main__":
    for _name, _lines in files().items():
        if sys.argv[1:] == [_name]:
            sys.stdout.write("\n".join(_lines) + "\n")
            break
    else:
        sys.exit("usage: python -m blockrelay.redis.users control|payload|replication|sentinel")
