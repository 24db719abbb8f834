"""`compatibility.md`: what real clients ask, and what becomes of it."""

import json
from collections.abc import Mapping
from typing import Any

from docs.generate.tables import table
from tests.clients.table import WORKS, Client, clients

_HEAD = """\
# Compatibility

What clients ask at their start, and the fields that they send. `make test-clients` runs every line with the real
client, in the version named, against a whole system (`blockrelay up`), with keep-alives in its streams; requests by
curl have the fields that the client sends. A line that works must work for ever.

*Not yet* says how a call is refused today: the status, and the field that the error names. Nothing that would change an
answer is ignored. [HTTP API](http-api.md) lists every field, [errors](errors.md) every status.
"""


def page() -> str:
    """The whole page."""
    known = clients()
    total, works = sum(len(client.cases) for client in known), sum(client.works for client in known)
    summary = table(
        ("client", "version", "work", "not yet"),
        [
            (client.title, ", ".join(client.versions()), str(client.works), str(len(client.cases) - client.works))
            for client in known
        ],
    )
    sections = "".join(_section(client) for client in known)
    return f"{_HEAD}\n{works} of {total} cases work.\n\n{summary}{sections}"


def _section(client: Client) -> str:
    rows = [(f"`{name}`", _what(row), _today(row["is"])) for name, row in client.cases.items()]
    return f"\n## {client.title}\n\n{table(('case', 'what it is', 'today'), rows)}"


def _what(row: Mapping[str, Any]) -> str:
    said = [row["does"]] if "does" in row else []
    if "request" in row:
        said.append(f"`{row['request']}`")
    said += [f"`{json.dumps(fields)}`" for fields in (row.get("sends"), row.get("body")) if fields]
    return ", ".join(said)


def _today(is_: str) -> str:
    if is_ == WORKS:
        return "works"
    status, _, field = is_.partition(" ")
    return f"not yet: {status}, `{field}`" if field else f"not yet: {status}"
