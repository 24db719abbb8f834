"""The process behind `blockrelay precision`: `python -m blockrelay_scheduler.plan_command.precision`.

Shows the precisions of a running cell, and has all workers serve another one while requests run. The docstrings of the
commands are their help texts.
"""

import json
import sys
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from blockrelay.command_app import run_app
from blockrelay.errors import ServiceUnavailable
from blockrelay.protocol.plan import Plan
from blockrelay.redis.registry import read_plan, read_workers
from blockrelay.typed_command import typed
from blockrelay_scheduler.plan_command.cell import AsJson, Data, DryRun, ModelKey, RedisUrl, Served, enter, served_model
from blockrelay_scheduler.planning.degradation import Degraded, degraded_from
from blockrelay_scheduler.planning.precision_change import Precisions, check_change, precisions_of

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def show(
    context: typer.Context,
    redis: RedisUrl = None,
    data: Data = None,
    model_key: ModelKey = None,
    as_json: AsJson = False,
) -> None:
    """Show in which precisions a running model can be served, and which worker serves which."""
    if context.invoked_subcommand is not None:
        return
    with served_model(redis, data, model_key) as served:
        _show(_now(served), degraded_from(served.history), as_json=as_json)


@app.command("set")
def set_precision(
    precision: Annotated[str, typer.Argument(metavar="PRECISION", help="Such as w4a8, or the key of a folder.")],
    redis: RedisUrl = None,
    data: Data = None,
    model_key: ModelKey = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Have all workers serve the model in another precision. New requests take it; others end in that which they began
    in."""
    with served_model(redis, data, model_key) as served:
        workers = read_workers(served.client, served.keys, served.model)
        newest = replace(served.plan, folder=served.folder)
        folder = check_change(workers, newest, served.model, precision)
        degraded = degraded_from(served.history) is not None
        # Setting the precision that memory has chosen keeps it when memory comes back.
        same = folder.key == (served.folder or served.model) and not degraded
        answer: dict[str, Any] = {"precision": folder.precision, "folder": folder.key, "changed": False}
        text = "this is the precision already: nothing to change" if same else "nothing was changed (--dry-run)"
        if not same and not dry_run:
            if not served.history:
                raise ServiceUnavailable("the plan history is empty: a scheduler enters the plan in force, try again")
            planned = replace(served.history[0].planned, folder="" if folder.key == served.model else folder.key)
            entry, plan = enter(served, planned, "precision")
            answer |= {"changed": True, "entry": entry.id, "epoch": plan.epoch}
            progress, back = typed("precision"), typed("plan rollback")
            text = (
                f"{folder.precision} is in force as epoch {plan.epoch} (entry {entry.id}): workers change one after "
                f"the other, `{progress}` shows how far they are; `{back}` takes it back"
            )
        typer.echo(json.dumps(answer, indent=1) if as_json else text)


def _now(served: Served) -> Precisions:
    plan: Plan = read_plan(served.client, served.keys, served.model) or served.plan
    return precisions_of(read_workers(served.client, served.keys, served.model), plan, served.model)


def _show(now: Precisions, degraded: Degraded | None, *, as_json: bool) -> None:
    """Prints one row for each folder, and from which one memory has the system `degraded`."""
    original = now.name_of(degraded.original or now.model) if degraded else None
    rows: list[dict[str, Any]] = [
        {
            "precision": folder.precision,
            "folder": key,
            "kv_cache_layout": folder.kv_cache_layout,
            "in_force": key == now.wanted,
            "workers": list(now.serving.get(key, ())),
        }
        for key, folder in sorted(now.available.items(), key=lambda one: one[1].precision)
    ]
    if as_json:
        answer = {"precisions": rows, "pending": list(now.pending), "short": list(now.short), "degraded_from": original}
        typer.echo(json.dumps(answer, indent=1))
        return
    table = Table("precision", "KV pages", "in force", "served by", "folder", title=f"precisions of model {now.model}")
    for row in rows:
        in_force = "yes" if row["in_force"] else ""
        table.add_row(row["precision"], row["kv_cache_layout"], in_force, "\n".join(row["workers"]), row["folder"])
    Console().print(table)
    if original is not None:
        typer.echo(f"memory lacks for {original}, which comes back when there is room (`precision set` keeps another)")
    if now.short:
        typer.echo(f"lack memory for {now.name_of(now.wanted)}: {', '.join(now.short)}")
    if now.pending:
        typer.echo(f"do not serve {now.name_of(now.wanted)} yet: {', '.join(now.pending)}")


def run(arguments: list[str] | None = None) -> int:
    """Runs the command with `arguments` (None: those of the process) and returns its exit code.

    It is 0, 2 for input that the user must change, 130 after Ctrl-C, or 1 for any other failure. An error is one line
    on stderr.
    """
    return run_app(app, arguments, name="blockrelay precision")


if __name__ == "__main__":
    sys.exit(run())
