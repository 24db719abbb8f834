"""Prints plan reports as tables."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from blockrelay.quantities import format_quantity, format_seconds
from blockrelay.typed_command import typed
from blockrelay_scheduler.planning.prediction import SIZES
from blockrelay_scheduler.planning.report import PlanReport


def show(report: PlanReport) -> None:
    """Prints the stages of a plan, its predicted times, and the reasons."""
    console = Console()
    console.print(_stages(report))
    console.print(_times(report))
    _print_notes(console, report)


def show_beside(reports: Mapping[str, PlanReport]) -> None:
    """Prints several plans, given by their titles: their stages one below the other, then a table of all speeds."""
    console = Console()
    for title, report in reports.items():
        table = _stages(report)
        table.title = f"{title}: {table.title}"
        console.print(table)
    table = _by_size("predicted")
    for title, report in reports.items():
        _add_steps(table, f"step {title}", report)
    for title, report in reports.items():
        _add_rates(table, f"tokens/s {title}", report)
    console.print(table)
    for title, report in reports.items():
        console.print(f"{title}:")
        _print_notes(console, report)


def _stages(report: PlanReport) -> Table:
    """Returns a table of the stages: their blocks, devices and bytes."""
    promise = report.problem.promise
    aim = f" for {report.problem.objective}" if report.strategy == "auto" else ""  # other strategies ignore it
    table = Table("blocks", "devices", "class", title=f"{report.strategy}{aim}: {promise}")
    for head in ("weights", "KV pages", "memory"):
        table.add_column(head, justify="right")
    for stage in report.stages:
        table.add_row(
            stage.blocks,
            ", ".join(stage.part.devices),
            stage.device_class,
            format_quantity(stage.weight_bytes, "B"),
            format_quantity(stage.kv_bytes, "B"),
            "-" if stage.memory_bytes is None else format_quantity(stage.memory_bytes, "B"),
        )
    return table


def _times(report: PlanReport) -> Table:
    """Returns a table of the times of a step: each stage and all hops for one group of requests, and the whole."""
    table = _by_size("predicted")
    several = any(one.groups > 1 for one in report.predicted)
    if several:
        table.add_row("groups in flight", *(str(one.groups) for one in report.predicted))
    for at, stage in enumerate(report.stages):
        table.add_row(stage.blocks, *(format_seconds(one.part_seconds[at]) for one in report.predicted))
    if len(report.stages) > 1:
        table.add_row("hops", *(format_seconds(one.hop_seconds) for one in report.predicted))
    table.add_row("sampling, messages", *(format_seconds(one.overhead_seconds) for one in report.predicted))
    table.add_section()
    _add_steps(table, "step of all" if several else "step", report)
    _add_rates(table, "tokens/s", report)
    return table


def _add_steps(table: Table, name: str, report: PlanReport) -> None:
    """Adds the seconds of a step to a table: one row, or two (least and most) where not everything was measured."""
    if not report.spreads:
        table.add_row(name, *(format_seconds(one.seconds) for one in report.predicted))
        return
    table.add_row(f"{name}, at least", *(format_seconds(least) for least, _ in report.spreads))
    table.add_row(f"{name}, at most", *(format_seconds(upper) for _, upper in report.spreads))


def _add_rates(table: Table, name: str, report: PlanReport) -> None:
    """Adds tokens per second to a table: one row, or two (least and most) where not everything was measured."""
    if not report.spreads:
        table.add_row(name, *(_rate(one.tokens_per_second) for one in report.predicted))
        return
    pairs = list(zip(report.predicted, report.spreads, strict=True))
    table.add_row(f"{name}, at least", *(_rate(one.requests / upper) for one, (_, upper) in pairs))
    table.add_row(f"{name}, at most", *(_rate(one.requests / least) for one, (least, _) in pairs))


def _by_size(title: str) -> Table:
    table = Table("requests at once", title=title)
    for size in SIZES:
        table.add_column(str(size), justify="right")
    return table


def _print_notes(console: Console, report: PlanReport) -> None:
    """Prints the reasons, and what was not measured."""
    for reason in report.reasons:
        console.print(f"- {reason}")
    if summary := (report.placement.notes or {}).get("summary"):
        console.print(f"- {summary}")
    if report.measured:
        console.print(f"profile: {report.measured}")
    if report.spreads:
        run_id = typed("profile")
        console.print(f"not profiled: run `{run_id}` and give --profile FILE; until then speeds are ranges")
    if report.estimated:
        console.print(f"estimated, not profiled: {', '.join(report.estimated)}")
    for assumed in report.assumed:
        console.print(f"assumed: {assumed}")


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"
