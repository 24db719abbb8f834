"""Which pages are generated, and by what."""

from pathlib import Path

from docs.generate import (
    command_line,
    compatibility,
    dashboards,
    failure_points,
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
    "dashboards.md": dashboards.page,
    "settings.md": settings.page,
    "metrics.md": metrics.page,
    "redis-keys.md": redis_keys.page,
    "failpoints.md": failure_points.page,
    "command-line.md": command_line.page,
    "http-api.md": http_api.page,
    "compatibility.md": compatibility.page,
    "plan-examples.md": plan_examples.page,
    "states.md": states.page,
    "sizing.md": sizing.page,
}


def pages() -> dict[str, str]:
    """The text of every page that is generated, wholly or in part, by its name in docs/. Equal on every machine."""
    whole = {name: f"<!-- made by {COMMAND}; do not edit -->\n\n{page()}" for name, page in _PAGES.items()}
    return whole | {"modules.md": modules.page()}
