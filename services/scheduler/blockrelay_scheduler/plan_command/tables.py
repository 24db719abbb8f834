"""Plan reports as tables for people."""

from rich.console import Console
from rich.table import Table

from blockrelay.quantities import format_quantity
from blockrelay_scheduler.planning.prediction import SIZES
from blockrelay_scheduler.planning.report import PlanReport


def show(found: PlanReport) -> None:
    """Stages, what is predicted, and the reasons."""
    console = Console()
    console.print(_stages(found))
    console.print(_times(found))
    _print_notes(console, found)


def show_beside(today: PlanReport, then: PlanReport) -> None:
    """Two plans one below the other, and their speeds side by side."""
    console = Console()
    for title, found in (("today", today), ("then", then)):
        table = _stages(found)
        table.title = f"{title}: {table.title}"
        console.print(table)
    table = _by_size("predicted")
    for title, found in (("today", today), ("then", then)):
        table.add_row(f"step {title}", *(_milliseconds(one.seconds) for one in found.predicted))
        table.add_row(f"tokens/s {title}", *(f"{one.tokens_per_second:.4g}" for one in found.predicted))
    console.print(table)
    _print_notes(console, then)


def _stages(found: PlanReport) -> Table:
    """Where the blocks are and what they need."""
    promise = found.problem.promise
    title = f"{found.strategy}, for {found.problem.objective}: {promise.requests} requests of {promise.context} tokens"
    table = Table("blocks", "devices", "class", title=title)
    for head in ("weights", "KV pages", "of"):
        table.add_column(head, justify="right")
    for stage in found.stages:
        table.add_row(
            stage.blocks,
            ", ".join(stage.part.devices),
            stage.device_class,
            format_quantity(stage.weight_bytes, "B"),
            format_quantity(stage.kv_bytes, "B"),
            "-" if stage.memory_bytes is None else format_quantity(stage.memory_bytes, "B"),
        )
    return table


def _times(found: PlanReport) -> Table:
    """What a step takes: of each stage, and whole."""
    table = _by_size("predicted")
    for stage in found.stages:
        table.add_row(f"blocks {stage.blocks}", *map(_milliseconds, stage.seconds.values()))
    table.add_section()
    table.add_row("step", *(_milliseconds(one.seconds) for one in found.predicted))
    table.add_row("tokens/s", *(f"{one.tokens_per_second:.4g}" for one in found.predicted))
    return table


def _by_size(title: str) -> Table:
    table = Table("requests at once", title=title)
    for size in SIZES:
        table.add_column(str(size), justify="right")
    return table


def _print_notes(console: Console, found: PlanReport) -> None:
    for reason in found.reasons:
        console.print(f"- {reason}")
    if summary := (found.placement.notes or {}).get("summary"):
        console.print(f"- {summary}")
    if found.estimated:
        console.print(f"estimated, not profiled: {', '.join(found.estimated)}")


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
