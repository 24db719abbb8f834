"""Which pages are generated, and by what."""

from pathlib import Path

from docs.generate import (
    command_line,
    compatibility,
    dashboards,
    http_api,
    metrics,
    modules,
    plan_examples,
    redis_keys,
    settings,
    sizing,
    states,
)

FOLDER = Path(__file__).parents[1]
#: What refreshes them all.
COMMAND = "make docs-pages"

_PAGES = {
    "settings.md": settings.page,
    "metrics.md": metrics.page,
    "redis-keys.md": redis_keys.page,
    "command-line.md": command_line.page,
    "http-api.md": http_api.page,
    "compatibility.md": compatibility.page,
    "states.md": states.page,
    "sizing.md": sizing.page,
}

#: The names of those that have nothing written by hand.
WHOLLY_GENERATED = tuple(_PAGES)
#: Pages that are written by hand but for one part, which stands between two marks that have its name.
_PARTS = {
    "observability.md": ("panels", dashboards.panels),
    "plans.md": ("examples", plan_examples.examples),
}


def pages() -> dict[str, str]:
    """The text of every page that is generated, wholly or in part, by its name in docs/. Equal on every machine."""
    whole = {name: f"<!-- made by {COMMAND}; do not edit -->\n\n{page()}" for name, page in _PAGES.items()}
    parts = {name: _with_part(name, mark, part()) for name, (mark, part) in _PARTS.items()}
    return whole | parts | {"modules.md": modules.page()}


def _with_part(name: str, mark: str, part: str) -> str:
    """The page in docs/ of that name, with `part` between its marks."""
    begin, end = f"<!-- {mark}: made by {COMMAND} -->\n", f"<!-- end of {mark} -->"
    before, rest = (FOLDER / name).read_text().split(begin)
    return f"{before}{begin}{part}{rest[rest.index(end) :]}"
