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

For operators who set a service, and for developers who test one.

Each setting is an environment variable or the option of the same name of the service's process, which wins:
`BLOCKRELAY_MAX_ROWS=256` or `python -m blockrelay_worker --max-rows 256`. A service refuses a value that it cannot use,
and a `BLOCKRELAY_` name that no service knows (exit code 2). `blockrelay up` passes its environment on to all services
that it starts.

`BLOCKRELAY_RETENTION_S` and `BLOCKRELAY_DEAD_AFTER_S` hold for the whole cell: the scheduler's values count.
"""
_FOR_OPERATORS = "\n## What operators set\n"
_FOR_DEVELOPERS = """
## What developers and tests set

These have defaults that fit every machine we know: the pace of the services' own loops, limits that guard against
defects, what `blockrelay up` sets by itself, and what tests and measurements need.
"""
_PARTS: tuple[tuple[str, type[Settings]], ...] = (
    ("All services", Settings),
    ("Gateway", GatewaySettings),
    ("Scheduler", SchedulerSettings),
    ("Worker", WorkerSettings),
)
#: Settings whose defaults an operator has no reason to change: pace of the services' own loops, limits that guard
#: against defects, what `up` sets by itself, and what tests and measurements need.
DEVELOPERS = frozenset({
    "arrival_timeout_s", "beat_s", "body_helpers", "canary_s", "dead_after_s", "device_id", "draft_tokens",
    "enforce_eager", "failpoint", "fallback_wait_s", "gpu_stages", "grace_s", "graph_mode", "imported_model",
    "inject_memory", "inject_numerics", "inject_speed", "keep_alive_s", "kv_overcommit", "local_rows",
    "max_retry_attempts", "max_rows", "max_warm_sessions", "node_id", "numerics_wait_s", "page_allocation",
    "page_store_bytes", "page_store_folder", "page_store_ttl_s", "per_block", "prefix_cache", "prompt_tokens_per_s",
    "raise_protocol", "replan_after_s", "replan_every_s", "replan_gain", "restore_after_s", "sequential",
    "session_timeout_s", "spare_workers", "speculation", "stalled_after_s", "step_target_s", "tick_s",
    "tensor_parallel", "use_graph_cache", "vacancy_s", "warm_session_bytes",
})  # fmt: skip


def page() -> str:
    """The whole page: a table for each service of what operators set, then one of what developers and tests set."""
    parts = [_HEAD, _FOR_OPERATORS]
    parts += [_part(title, kind, developers=False) for title, kind in _PARTS]
    parts.append(_FOR_DEVELOPERS)
    parts += [_part(title, kind, developers=True) for title, kind in _PARTS]
    return "".join(parts)


def own_settings(kind: type[Settings]) -> dict[str, FieldInfo]:
    """The settings of one service by name, without those that all services share."""
    fields = kind.model_fields
    return {name: field for name, field in fields.items() if kind is Settings or name not in Settings.model_fields}


def _part(title: str, kind: type[Settings], *, developers: bool) -> str:
    """A heading and its table; the second heading of a service has another anchor."""
    rows = [
        (f"`BLOCKRELAY_{name.upper()}`", _type(field), _default(field), field.description or "")
        for name, field in own_settings(kind).items()
        if (name in DEVELOPERS) == developers
    ]
    suffix = ", for developers" if developers else ""
    return f"\n### {title}{suffix}\n\n{table(('setting', 'values', 'default', 'meaning'), rows)}"


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
