"""docs/redis-keys.md, from the table of keys."""

from blockrelay.protocol.keys import SCRIPTS_OF, table
from docs.generate.tables import table as markdown

_HEAD = """\
# Redis keys

For developers, and for operators who look into Redis or restrict its users.

All keys of a cell share the hash tag `{cell}` and so one slot of a Redis Cluster. `<model>` is the start of the model
hash, `<class>` is `gpu` or `cpu`. Names in capitals are scripts; the others are services that use the key directly.
Keys are on the control Redis unless the table says "payload Redis".

"""
_TAIL = """
The launcher, and people, have the rights of an administrator. The Redis users in `deploy/redis/` are made from the same
table: `python -m blockrelay.redis.users control|payload`.

Beside the keys there is one channel, `{cell}:status-events`, on the control Redis: workers publish there what stages
do, while somebody follows (`blockrelay.protocol.status_events`).
"""


def page() -> str:
    """The whole page."""
    keys = "\n".join(table())
    callers = markdown(("service", "scripts"), [(role, ", ".join(names)) for role, names in SCRIPTS_OF.items()])
    return f"{_HEAD}{keys}\n\n## Who calls which script\n\n{callers}{_TAIL}"
