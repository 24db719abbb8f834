"""`compatibility.md`: what real clients ask, and what becomes of it."""

import json
from collections.abc import Mapping
from typing import Any

from blockrelay_gateway.api.openai.schemas import IGNORED
from docs.generate.tables import table
from tests.clients.table import WORKS, Client, clients

_HEAD = """\
# Compatibility

For people who have a client and ask whether it works here.

What clients ask when they start, and the fields that they send. `make test-clients` runs every line against a whole
system (`blockrelay up`), with keep-alives in its streams: with the client itself, in the version named, or, where a
client says "its requests, by curl", with the requests that it sends. What works in one release works in all later ones.

"Not yet" is followed by how a call is refused today: the status, and the field that the error names. A field that would
change an answer is never ignored; one that changes nothing is, and the answer names it in `x-blockrelay-ignored`.
[HTTP API](http-api.md) lists every field, [errors](api.md#errors) every status.
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
    rows = [(f"`{name}`", _what(row), _today(row)) for name, row in client.cases.items()]
    return f"\n## {client.title}\n\n{table(('case', 'what it is', 'today'), rows)}"


def _what(row: Mapping[str, Any]) -> str:
    said = [row["does"]] if "does" in row else []
    if "request" in row:
        said.append(f"`{row['request']}`")
    said += [f"`{json.dumps(fields)}`" for fields in (row.get("sends"), row.get("body")) if fields]
    return ", ".join(said)


def _today(row: Mapping[str, Any]) -> str:
    if row["is"] == WORKS:
        sent = {**row.get("sends", {}), **row.get("body", {})}
        ignored = [name for name, value in sent.items() if name in IGNORED and value not in IGNORED[name]]
        return f"works: {', '.join(f'`{name}`' for name in ignored)} is ignored" if ignored else "works"
    status, _, field = row["is"].partition(" ")
    refused = f"{status}, `{field}`" if field else status
    return f"refused, as it should be: {refused}" if row.get("right") else f"not yet: {refused}"
