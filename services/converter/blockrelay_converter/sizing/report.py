"""Formats a sizing as lines or as JSON: every figure with its source. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from textwrap import wrap
from typing import Any

from blockrelay.block_folder.precisions import format_precisions
from blockrelay.quantities import counted, format_quantity, format_seconds
from blockrelay_converter.policy import FIRST_TOKEN_DISK_S, PLANNED_SHARE
from blockrelay_converter.sizing import measured
from blockrelay_converter.sizing.capacity import Capacity, ExpectedLoad, ModelNeed, disk_effect
from blockrelay_converter.sizing.measured import SOURCES
from blockrelay_converter.sizing.pace import Paces
from blockrelay_converter.sizing.sized import Sized

Unit = str
"""B, B/s, /s, s or cores, in which a figure's numbers are; "" for a plain number. A key of _UNITS."""
_UNITS: dict[Unit, Callable[[float], str]] = {
    "B": lambda value: format_quantity(value, "B"),
    "B/s": lambda value: format_quantity(value, "B/s"),
    "/s": lambda value: format_quantity(value, "/s"),
    "s": format_seconds,
    "cores": lambda value: f"{value:.2g} cores" if value < 10 else f"{value:,.0f} cores",
    "": lambda value: f"{value:,.0f}",
}


_WIDTH = 80
#: Durations of a sync (seconds) whose effects are shown: a local SSD, and a slow network disk.
FSYNCS = (0.001, 0.01)
#: A range whose ends differ by at most this factor is shown as one number.
_ALIKE = 1.03


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRow:
    """One figure of the report, as a range from `low` to `high`; `source` is a key of SOURCES."""

    key: str
    """Its name in JSON."""
    says: str
    """Its label for people."""
    low: float
    high: float
    unit: Unit
    source: str

    @property
    def shown(self) -> str:
        """The figure with its unit as text for people; one number if both ends are about the same."""
        low, high = _UNITS[self.unit](self.low), _UNITS[self.unit](self.high)
        return high if self.high <= _ALIKE * self.low else f"{low} to {high}"

    def to_json(self) -> dict[str, Any]:
        """Returns the figure for JSON: `value`, or `low` and `high`, with `unit` and `source`."""
        value = {"value": self.low} if self.low == self.high else {"low": self.low, "high": self.high}
        return {**value, "unit": self.unit, "source": self.source}


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The figures of one part of a system, under a title."""

    key: str
    title: str
    rows: Sequence[ReportRow]


def sections(sized: Sized) -> list[Section]:
    """Returns all sections of the report."""
    return [_model(sized.model, sized.load), *_by_pace(sized.slow, sized.fast, sized.paces, sized.load)]


def _model(model: ModelNeed, load: ExpectedLoad) -> Section:
    def row(key: str, says: str, value: float, source: str = "shape") -> ReportRow:
        return ReportRow(key=key, says=says, low=value, high=value, unit="B", source=source)

    rows = [
        row("weight_bytes", "weights, in all", model.weight_bytes),
        row("rotary_bytes", "rotary tables, each worker", model.rotary_bytes),
        row("kv_bytes_per_token", "KV of a token", model.kv_bytes_per_token),
        row("kv_bytes_per_request", f"KV of a request of {load.prompt}+{load.new}", model.kv_bytes_per_request),
        row("kv_bytes_per_context", f"KV of a request of {load.context}", model.kv_bytes_per_context),
    ]
    for number, stage in enumerate(model.stages):
        name = f"stage {number}, blocks {stage.first}-{stage.last}"
        memory = stage.cpu_memory + model.rotary_bytes
        rows += [
            row(f"stage_{number}_weight_bytes", f"{name}: weights", stage.weight_bytes),
            row(f"stage_{number}_kv_bytes", f"  KV of {load.at_once} requests (BLOCKRELAY_KV_BYTES)", stage.kv_bytes),
            row(f"stage_{number}_cpu_bytes", "  memory of a CPU worker", memory, measured.WORKER_ALONE_BYTES.source),
            row(f"stage_{number}_gpu_bytes", "  or of the GPU", stage.gpu_memory, "model"),
        ]
    return Section(key="model", title="Memory of workers", rows=rows)


def _by_pace(slow: Capacity, fast: Capacity, paces: Paces, load: ExpectedLoad) -> Iterator[Section]:
    def row(key: str, says: str, of: Callable[[Capacity], float], unit: Unit, source: str) -> ReportRow:
        low, high = sorted((of(slow), of(fast)))
        return ReportRow(key=key, says=says, low=low, high=high, unit=unit, source=source)

    def with_fsync(fsync_s: float) -> Iterator[ReportRow]:
        duration, prefix = format_seconds(fsync_s), f"with_{1000 * fsync_s:g}_ms"
        for key, says, field, unit in (
            ("first_token_s", f"with one of {duration}: a first token waits", "first_token_s", "s"),
            ("writes_a_sync", "  acceptances, COMMITs that share one", "writes_a_sync", ""),
            ("commits_per_second", "  COMMITs of a worker, at most", "commits_per_second_a_worker", "/s"),
        ):
            yield row(f"{prefix}_{key}", says, lambda c, f=field: getattr(disk_effect(c, fsync_s), f), unit, "model")

    pace = ReportRow(
        key="tokens_per_second_per_route",
        says="new tokens/s of a worker" if load.stages == 1 else "new tokens/s of a worker in each stage",
        low=paces.slow,
        high=paces.fast,
        unit="/s",
        source=paces.source,
    )
    yield Section(
        key="processes",
        title="Processes",
        rows=[
            pace,
            row("workers", f"workers, {PLANNED_SHARE:.0%} busy", lambda c: c.workers, "", paces.source),
            row("requests_at_once", "requests at once", lambda c: ceil(c.requests_at_once), "", "model"),
            row("gateways", "gateways", lambda c: c.gateways, "", "streams"),
            row("gateway_cpu", "  CPU of all of them", lambda c: c.gateway_cpu, "cores", "streams"),
            row("gateway_bytes", "  memory of each, with helpers", lambda c: c.gateway_bytes, "B", "capacity"),
            row("client_bytes_per_second", "  to clients", lambda c: c.client_bytes_per_second, "B/s", "streams"),
            row("schedulers", "schedulers of a cell, one a spare", lambda c: c.schedulers, "", "model"),
            row("scheduler_bytes", "  memory of each", lambda c: measured.SCHEDULER_BYTES.value, "B", "capacity"),
            row("cells", "cells, each with a control Redis", lambda c: c.cells, "", "streams"),
        ],
    )
    yield Section(
        key="control_redis",
        title="Control Redis, of all cells",
        rows=[
            row("commands_per_second", "commands", lambda c: c.redis_commands_per_second, "/s", "capacity"),
            row("cpu", "CPU, one thread a cell", lambda c: c.redis_cpu, "cores", "streams"),
            row("bytes", "memory in use", lambda c: c.redis_bytes, "B", "capacity"),
            row("maxmemory", "maxmemory to set (the pod: twice that)", lambda c: c.redis_maxmemory, "B", "model"),
            row("wire_bytes_per_second", "network", lambda c: c.redis_wire_bytes_per_second, "B/s", "streams"),
        ],
    )
    yield Section(
        key="disk",
        title="Its disk, appendfsync always",
        rows=[
            row("file_bytes_per_second", "appended", lambda c: c.disk.file_bytes_per_second, "B/s", "capacity"),
            row("device_bytes_per_second", "written, in pages of 4 KiB",
                lambda c: c.disk.device_bytes_per_second, "B/s", "capacity"),
            row("syncs_per_second", "syncs, at most", lambda c: c.disk.syncs_per_second, "/s", "capacity"),
            row("fsync_own_s", "longer ones are shared by writes", lambda c: c.disk.fsync_own_s, "s", "model"),
            row("fsync_needed_s", "fsync needed (p99)", lambda c: c.disk.fsync_needed_s, "s", "model"),
            row("fsync_step_s", "  for tokens one step at a time", lambda c: c.disk.fsync_step_s, "s", "model"),
            row("fsync_first_token_s", f"  for at most {format_seconds(FIRST_TOKEN_DISK_S)} of a first token",
                lambda c: c.disk.fsync_first_token_s, "s", "model"),
            *(one for fsync_s in FSYNCS for one in with_fsync(fsync_s)),
        ],
    )  # fmt: skip
    yield Section(
        key="between_stages",
        title="Rows between stages, once in and once out of the payload Redis",
        rows=[
            row("prompt_bytes_per_second", "prompts", lambda c: c.payload_prompt_bytes_per_second, "B/s", "shape"),
            row("token_bytes_per_second", "new tokens", lambda c: c.payload_bytes_per_second, "B/s", "shape"),
        ],
    )


def lines(sized: Sized) -> list[str]:
    """Returns the report as lines for a terminal of 80 columns."""
    load = sized.load
    shown = [
        f"{sized.name} in {format_precisions(sized.precisions)}, context {load.context}, "
        f"{counted(load.stages, 'stage')}, {load.at_once} requests at once",
        f"{load.requests_per_second:g} requests/s of {load.prompt} prompt and {load.new} new tokens",
        f"{format_quantity(load.prompt_tokens_per_second)} prompt and {format_quantity(load.tokens_per_second)} new "
        "tokens/s",
    ]
    used: dict[str, None] = {}
    for section in sections(sized):
        shown += ["", section.title]
        for row in section.rows:
            shown.append(f"  {row.says:<42}{row.shown:<22}{row.source}".rstrip())
            used[row.source] = None
    shown.append("")
    if sized.paces.source == "not profiled":
        shown += [
            "not profiled: `blockrelay profile --model DIR` on such a worker and --profile,",
            "or --tokens-per-second-per-worker, make one figure of each range.",
        ]
    for name in used:
        shown += wrap(f"{name}: {SOURCES[name]}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return shown


def to_json(sized: Sized) -> dict[str, Any]:
    """Returns the JSON object that `analyse --sizing --json` prints."""
    return {
        "model": sized.name,
        "precision": format_precisions(sized.precisions),
        "load": asdict(sized.load),
        **{section.key: {row.key: row.to_json() for row in section.rows} for section in sections(sized)},
        "sources": dict(SOURCES),
    }
