"""Plan reports as tables for people."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from blockrelay.quantities import counted, format_quantity, format_seconds
from blockrelay.typed_command import typed
from blockrelay_scheduler.planning.prediction import SIZES
from blockrelay_scheduler.planning.report import PlanReport


def show(found: PlanReport) -> None:
    """Stages, what is predicted, and the reasons."""
    console = Console()
    console.print(_stages(found))
    console.print(_times(found))
    _print_notes(console, found)


def show_beside(reports: Mapping[str, PlanReport]) -> None:
    """Plans by their titles: one below the other, their speeds side by side, and their reasons."""
    console = Console()
    for title, found in reports.items():
        table = _stages(found)
        table.title = f"{title}: {table.title}"
        console.print(table)
    table = _by_size("predicted")
    for title, found in reports.items():
        _add_steps(table, f"step {title}", found)
    for title, found in reports.items():
        _add_rates(table, f"tokens/s {title}", found)
    console.print(table)
    for title, found in reports.items():
        console.print(f"{title}:")
        _print_notes(console, found)


def _stages(found: PlanReport) -> Table:
    """Where the blocks are and what they need."""
    promise = found.problem.promise
    aim = f" for {found.problem.objective}" if found.strategy == "auto" else ""  # the others do not ask
    asked = f"{counted(promise.requests, 'request')} of {counted(promise.context, 'token')}"
    title = f"{found.strategy}{aim}: {asked}"
    table = Table("blocks", "devices", "class", title=title)
    for head in ("weights", "KV pages", "memory"):
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
    """What a step takes: each stage and all hops for one group of its requests, and the whole."""
    table = _by_size("predicted")
    several = any(one.groups > 1 for one in found.predicted)
    if several:
        table.add_row("groups in flight", *(str(one.groups) for one in found.predicted))
    for at, stage in enumerate(found.stages):
        table.add_row(stage.blocks, *(format_seconds(one.part_seconds[at]) for one in found.predicted))
    if len(found.stages) > 1:
        table.add_row("hops", *(format_seconds(one.hop_seconds) for one in found.predicted))
    table.add_row("sampling, messages", *(format_seconds(one.overhead_seconds) for one in found.predicted))
    table.add_section()
    _add_steps(table, "step of all" if several else "step", found)
    _add_rates(table, "tokens/s", found)
    return table


def _add_steps(table: Table, name: str, found: PlanReport) -> None:
    """One row, or two where not all was measured."""
    if not found.spreads:
        table.add_row(name, *(format_seconds(one.seconds) for one in found.predicted))
        return
    table.add_row(f"{name}, at least", *(format_seconds(least) for least, _ in found.spreads))
    table.add_row(f"{name}, at most", *(format_seconds(most) for _, most in found.spreads))


def _add_rates(table: Table, name: str, found: PlanReport) -> None:
    """Adds tokens per second: one row, or two where not all was measured."""
    if not found.spreads:
        table.add_row(name, *(_rate(one.tokens_per_second) for one in found.predicted))
        return
    pairs = list(zip(found.predicted, found.spreads, strict=True))
    table.add_row(f"{name}, at least", *(_rate(one.requests / most) for one, (_, most) in pairs))
    table.add_row(f"{name}, at most", *(_rate(one.requests / least) for one, (least, _) in pairs))


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
    if found.measured:
        console.print(f"profile: {found.measured}")
    if found.spreads:
        run = typed("profile")
        console.print(f"not profiled: run `{run}` and give --profile FILE; until then speeds are ranges")
    if found.estimated:
        console.print(f"estimated, not profiled: {', '.join(found.estimated)}")
    for assumed in found.assumed:
        console.print(f"assumed: {assumed}")


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"
