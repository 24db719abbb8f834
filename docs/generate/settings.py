"""docs/settings.md, from the settings models."""

import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic.fields import FieldInfo

from blockrelay.settings import BUNDLED_MODEL, GatewaySettings, SchedulerSettings, Settings, WorkerSettings
from docs.generate.tables import table

_HEAD = """\
# Settings

Each setting is an environment variable or the option of the same name of the service's process, which wins:
`BLOCKRELAY_MAX_ROWS=256` or `python -m blockrelay_worker --max-rows 256`. A service refuses a value that it cannot use,
and a `BLOCKRELAY_` name that no service knows (exit code 2). `blockrelay up` passes its environment on to all services
that it starts.

`BLOCKRELAY_RETENTION_S` and `BLOCKRELAY_DEAD_AFTER_S` hold for the whole cell: the scheduler's values count.
"""
_PARTS: tuple[tuple[str, type[Settings]], ...] = (
    ("All services", Settings),
    ("Gateway", GatewaySettings),
    ("Scheduler", SchedulerSettings),
    ("Worker", WorkerSettings),
)


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for title, kind in _PARTS:
        fields = kind.model_fields
        own = {name: field for name, field in fields.items() if kind is Settings or name not in Settings.model_fields}
        rows = [(f"`BLOCKRELAY_{n.upper()}`", _type(f), _default(f), f.description or "") for n, f in own.items()]
        parts.append(f"\n## {title}\n\n{table(('setting', 'values', 'default', 'meaning'), rows)}")
    return "".join(parts)


def _type(field: FieldInfo) -> str:
    limits = [text for part in field.metadata if (text := _limit(part))]
    return ", ".join([_name(field.annotation), *limits])


def _name(kind: Any) -> str:
    if get_origin(kind) in (Union, types.UnionType):
        return _name(next(part for part in get_args(kind) if part is not type(None)))
    if get_origin(kind) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(kind))
    return {str: "text", int: "whole number", float: "number", bool: "`true` or `false`", Path: "path"}[kind]


def _limit(part: object) -> str:
    match part:
        case Ge(ge=low):
            return f"at least {low}"
        case Gt(gt=low):
            return f"above {low}"
        case Le(le=high):
            return f"at most {high}"
        case _:
            pattern = getattr(part, "pattern", None)
            return f"`{pattern}`" if pattern else ""


def _default(field: FieldInfo) -> str:
    default = field.default
    if default is None or default == "":
        return ""
    if default == BUNDLED_MODEL:
        return "the bundled model"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"
