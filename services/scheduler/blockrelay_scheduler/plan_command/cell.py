"""Finds the model of a running cell for the commands that show or change its plans, and enters plans in its history.

Raises UsageError for a wrong address, for a cell without a plan, and for a model key that is wrong or lacking, and
ServiceUnavailable if Redis does not answer.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import redis
import typer

from blockrelay.errors import ServiceUnavailable, UsageError
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.plan import Plan
from blockrelay.protocol.planned_split import PlannedSplit
from blockrelay.redis.cell_address import connected, find_cell
from blockrelay.redis.plan_history import Origin, PlanEntry, append, read_history, this_person
from blockrelay.redis.registry import read_plan
from blockrelay.typed_command import typed
from blockrelay_scheduler.policy import APPLY_POLL_S, APPLY_S

RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis",
        metavar="URL",
        help="Control Redis: redis://HOST:PORT/DB, unix://PATH, or redis+sentinel://, redis+cluster://.",
    ),
]
Data = Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Data folder of a running `blockrelay up`.")]
ModelKey = Annotated[
    str | None, typer.Option("--model-key", metavar="KEY", help="Key of the model, where a cell has several.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@dataclass(frozen=True, slots=True)
class Served:
    """A model that a running cell serves, with its plans."""

    client: redis.Redis
    keys: Keys
    model: str
    """The model's key in Redis."""
    plan: Plan
    """The plan in force."""
    history: list[PlanEntry]
    """The plans that the cell was given, newest first."""

    @property
    def folder(self) -> str:
        """Key of the block folder of the newest plan, in force or not yet; "": that with which workers started."""
        return self.history[0].planned.folder if self.history else self.plan.folder


@contextmanager
def served_model(url: str | None, data: Path | None, model_key: str | None) -> Iterator[Served]:
    """Connects to the cell of a Redis URL or data folder. Raises UsageError where its model is not clear."""
    cell = find_cell(url, data)
    with connected(cell) as client:
        prefix = cell.keys.plan("")
        plan_keys = cast(list[bytes], sorted(client.scan_iter(f"{prefix}*", count=1000)))
        models = [key.decode()[len(prefix) :] for key in plan_keys]
        if not models:
            raise UsageError(f"cell {cell.settings.cell} has no plan yet: no scheduler has run there")
        if model_key is None and len(models) > 1:
            raise UsageError(f"cell {cell.settings.cell} has several models: --model-key {' or '.join(models)}")
        model = model_key or models[0]
        plan = read_plan(client, cell.keys, model)
        if plan is None:
            raise UsageError(f"cell {cell.settings.cell} has no model {model}: there is {', '.join(models)}")
        yield Served(client, cell.keys, model, plan, read_history(client, cell.keys, model))


def enter(served: Served, planned: PlannedSplit, origin: Origin) -> tuple[PlanEntry, Plan]:
    """Appends a plan to the history and waits up to APPLY_S seconds until a scheduler publishes it; returns both.

    Raises ServiceUnavailable where none does, and where another plan was entered at the same moment.
    """
    behind = served.history[0].id if served.history else ""
    entry = append(served.client, served.keys, served.model, planned, origin=origin, who=this_person(), behind=behind)
    if entry is None:
        history_command = typed("plan history")
        raise ServiceUnavailable(
            f"another plan was applied at the same moment, and this one was not: see `{history_command}`, try again"
        )
    return entry, _published(served, entry)


def _published(served: Served, entry: PlanEntry) -> Plan:
    """Waits for the plan of this entry and returns it.

    Raises ServiceUnavailable when no scheduler publishes it within APPLY_S.
    """
    end = time.monotonic() + APPLY_S
    while time.monotonic() < end:
        plan = read_plan(served.client, served.keys, served.model)
        if plan is not None and plan.epoch > served.plan.epoch and plan.source == entry.source:
            return plan
        time.sleep(APPLY_POLL_S)
    raise ServiceUnavailable(
        f"entry {entry.id} is the newest plan, but no scheduler has published it for {APPLY_S:.0f} s: start one, or "
        "look at its log"
    )
