"""`blockrelay plan apply | history | rollback`: shows the plans of a running cell, and gives it another one.

The commands print their result. `apply` and `rollback` wait until a scheduler publishes the plan.

Commands raise UsageError for a wrong file, entry or address, for a cell without a plan, for a model key that is wrong
or lacking, and for a plan that the workers cannot serve. They raise ServiceUnavailable if Redis does not answer, if no
scheduler publishes the plan, and if another plan was applied at the same moment. The docstrings of the commands are
their help texts.
"""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from blockrelay.errors import UsageError
from blockrelay.planning.plan_file import read_plan_file
from blockrelay.protocol.plan import parse_split
from blockrelay.protocol.planned_split import PlannedSplit
from blockrelay.redis.plan_history import MEMORY, Origin, PlanEntry
from blockrelay.redis.registry import read_lost_devices, read_workers
from blockrelay.typed_command import typed
from blockrelay_scheduler.plan_command.cell import AsJson, Data, DryRun, ModelKey, RedisUrl, Served, enter, served_model
from blockrelay_scheduler.planning.plan_change import PlanChange, change, unserved_gpus
from blockrelay_scheduler.planning.precision_change import check_folder, precisions_of


def apply(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Plan that `blockrelay plan --json` wrote.")],
    redis: RedisUrl = None,
    data: Data = None,
    model_key: ModelKey = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Give a running cell another plan. Workers load their new blocks, then take the requests over."""
    read_plan_file(file, None)  # an error in the file is reported even where no cell can be reached
    with served_model(redis, data, model_key) as served:
        blocks = parse_split(served.plan.split)[-1].last
        planned = replace(read_plan_file(file, blocks), folder=served.folder)
        _bring(served, planned, "apply", dry_run=dry_run, as_json=as_json)


def rollback(
    entry: Annotated[
        str | None,
        typer.Argument(metavar="ENTRY", help="Entry of `plan history` [default: the plan before this one]."),
    ] = None,
    redis: RedisUrl = None,
    data: Data = None,
    model_key: ModelKey = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Give a running cell a plan that it had before."""
    with served_model(redis, data, model_key) as served:
        _bring(served, planned_again(served.history, entry), "rollback", dry_run=dry_run, as_json=as_json)


def history(redis: RedisUrl = None, data: Data = None, model_key: ModelKey = None, as_json: AsJson = False) -> None:
    """Show the plans that a cell was given, newest first, and who gave each."""
    with served_model(redis, data, model_key) as served:
        now = precisions_of(read_workers(served.client, served.keys, served.model), served.plan, served.model)
        if as_json:
            entries = [_entry_json(entry, now.name_of(entry.planned.folder)) for entry in served.history]
            typer.echo(json.dumps(entries, indent=1))
            return
        title = f"plans of model {served.model}, newest first"
        table = Table("entry", "when", "split", "precision", "from", title=title)
        for entry in served.history:
            precision = now.name_of(entry.planned.folder)
            table.add_row(entry.id, _when(entry), entry.planned.text, precision, entry.source)
        Console().print(table)


def _earlier(entries: list[PlanEntry], wanted: str | None) -> PlanEntry:
    """Returns the entry to go back to: the one with the id `wanted`, or the newest that differs from the current plan.

    Changes that memory made count only where they are wanted by their id. Raises UsageError where there is none.
    `entries` are the newest first.
    """
    if wanted is not None:
        for entry in entries:
            if entry.id == wanted:
                return entry
        raise UsageError(f"the history has no entry {wanted}: see `{typed('plan history')}`")
    given = [entry for entry in entries if entry.origin not in MEMORY]
    for entry in given[1:]:
        if not entry.planned.serves_as(given[0].planned):
            return entry
    raise UsageError("there is no other plan in the history to go back to")


def planned_again(entries: list[PlanEntry], wanted: str | None) -> PlannedSplit:
    """Returns the plan of `_earlier`; in the precision that memory has chosen, unless it was given another one."""
    entry = _earlier(entries, wanted)
    given = next((one for one in entries if one.origin not in MEMORY), entry)
    keeps = wanted is None and entry.planned.folder == given.planned.folder
    return replace(entry.planned, folder=entries[0].planned.folder) if keeps else entry.planned


def _bring(served: Served, planned: PlannedSplit, origin: Origin, *, dry_run: bool, as_json: bool) -> None:
    """Appends `planned` to the history, waits until a scheduler publishes it, and prints what changes.

    Raises UsageError where the workers of the cell cannot serve it, and ServiceUnavailable where no scheduler publishes
    it or another plan was applied at the same moment.
    """
    workers = read_workers(served.client, served.keys, served.model)
    lost = [lost_device.device for lost_device in read_lost_devices(served.client, served.keys)]
    now = precisions_of(workers, served.plan, served.model)
    before, after = now.name_of(served.folder), now.name_of(planned.folder)
    if planned.folder != served.folder:
        key = planned.folder or served.model
        folder = now.available.get(key)
        if folder is None:
            raise UsageError(f"no worker has the folder {key} of that plan: start workers with --other-precision DIR")
        check_folder(workers, folder)
    plan_change = change(workers, planned, served.plan, lost=lost)
    same = bool(served.history) and served.history[0].planned.serves_as(planned)
    if not as_json:
        _show(plan_change, "" if before == after else f"{before} -> {after}", same=same, dry_run=dry_run)
    answer: dict[str, Any] = {**plan_change.to_json(), "precision": after, "changed": False}
    if not dry_run and not same:
        entry, plan = enter(served, planned, origin)
        # Read again: a device may have gone since the check.
        unserved = unserved_gpus(plan, planned, read_workers(served.client, served.keys, served.model))
        answer |= {"changed": True, "entry": entry.id, "epoch": plan.epoch, "unserved": unserved}
        if not as_json:
            back = typed("plan rollback")
            typer.echo(f"in force as epoch {plan.epoch} (entry {entry.id}); `{back}` takes it back")
        for line in unserved:
            typer.echo(f"warning: {line}", err=True)
    if as_json:
        typer.echo(json.dumps(answer, indent=1))


def _show(plan_change: PlanChange, precisions: str, *, same: bool, dry_run: bool) -> None:
    """Prints the stages of the new plan, and which workers load other blocks.

    `precisions` are that before and that after the change, `w4a8 -> w8a8`; empty: it stays.
    """
    plan = plan_change.plan
    table = Table("stage", "blocks", "devices", "workers", "why", title=f"{plan_change.before.split} -> {plan.split}")
    for index, stage in enumerate(parse_split(plan.split)):
        workers = [worker_id for worker_id, assigned in plan.assignments.items() if assigned == index]
        devices = ", ".join(plan.devices[index]) or "any"
        table.add_row(str(index), f"{stage.first}-{stage.last}", devices, "\n".join(workers), plan.reasons[index])
    Console().print(table)
    if same:
        typer.echo("this is the plan already: nothing to change")
        return
    if precisions:
        typer.echo(f"precision: {precisions}, all workers change to it one after the other")
    typer.echo(f"workers that load other blocks, while requests go on: {', '.join(plan_change.moving) or 'none'}")
    if dry_run:
        typer.echo("nothing was changed (--dry-run)")


def _entry_json(entry: PlanEntry, precision: str) -> dict[str, Any]:
    """Returns an entry, whose block folder has this precision, as `plan history --json` prints it."""
    return {
        "entry": entry.id,
        "when": _when(entry),
        "split": entry.planned.text,
        "precision": precision,
        "devices": list(map(list, entry.planned.devices)),
        "reasons": list(entry.planned.reasons),
        "origin": entry.origin,
        "who": entry.who,
    }


def _when(entry: PlanEntry) -> str:
    return datetime.fromtimestamp(entry.at_ms / 1000, UTC).isoformat(timespec="seconds")
