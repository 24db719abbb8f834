"""Turns the steps that stages recorded (`StageSpan`) into spans below a request's runs, and tiles each run. Pure.

At each moment of a run a stage computes tokens of the request, or tokens of it wait in a stage, or the request is
between two steps, which decide what is done meanwhile. So tiles cover the run without gaps, also if stages overlap.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from blockrelay.protocol.encoding.stage_span import StageSpan
from blockrelay_gateway.tracing.spans import Span, span_id

#: The kinds of tiles. `claiming`: a worker has claimed the request and has nothing to compute yet. `sending`: hidden
#: states go to the next stage. `sampling`: until the first stage has the token. `committing`: behind the last step.
#: `silent`: behind the last step that a failed run recorded.
Doing = Literal["computing", "waiting", "claiming", "sending", "sampling", "committing", "silent"]


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of a run in which the same thing was done for the request, by the same workers. Unix microseconds."""

    doing: Doing
    start_us: int
    end_us: int
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stages:
    """The steps of a request: a span for each, by their beginning; and the tiles of all runs with steps, in order."""

    spans: list[Span]
    tiles: list[Tile]


def stages_of(
    request_id: str, spans: Sequence[Span], steps: Iterable[StageSpan], record: Mapping[bytes, bytes]
) -> Stages:
    """Makes the spans and tiles of a request's steps.

    It changes `spans`, those of `request_spans`, with the request's span first. Each run with steps gets the seconds of
    each kind of tile, the request the number of steps that are here and of those known to be missing. `record` is the
    request's record in Redis.
    """
    whole, *_ = spans
    runs = [span for span in spans if span.name == "run"]
    under: dict[str, list[StageSpan]] = defaultdict(list)
    made: list[Span] = []
    all_tiles: list[Tile] = []
    for step in sorted(steps, key=lambda step: (step.began_us, step.stage)):
        parent = _run_of(step, runs, record) or whole
        under[parent.span_id].append(step)
        made.append(_span(request_id, parent, step))
    for run in [run for run in runs if run.span_id in under]:
        spent = dict.fromkeys(get_args(Doing), 0)
        for tile in (run_tiles := tiles(run, under[run.span_id])):
            spent[tile.doing] += tile.end_us - tile.start_us
        all_tiles += run_tiles
        run.attributes |= {f"blockrelay.{doing}_seconds": us / 1e6 for doing, us in spent.items()}
    whole.attributes["blockrelay.stage_steps"] = len(made)
    whole.attributes["blockrelay.stage_steps.missing"] = missing(step for some in under.values() for step in some)
    return Stages(made, all_tiles)


def tiles(run: Span, steps: Iterable[StageSpan]) -> list[Tile]:
    """The tiles of `run` from its beginning to its end, without a gap; `steps` are those of this run."""
    bounded = [_BoundedStep(step, *(min(max(at, run.start_us), run.end_us) for at in _times(step))) for step in steps]
    changes: dict[int, list[tuple[Counter[str], str, int]]] = {run.start_us: [], run.end_us: []}
    computing, waiting = Counter[str](), Counter[str]()
    for one in bounded:
        changes.setdefault(one.ready_us, []).append((waiting, one.step.worker_id, 1))
        changes.setdefault(one.began_us, []).extend(
            [(waiting, one.step.worker_id, -1), (computing, one.step.worker_id, 1)]
        )
        changes.setdefault(one.ended_us, []).append((computing, one.step.worker_id, -1))
    between = _Between(run, bounded)
    result: list[Tile] = []
    for start, end in pairwise(sorted(changes)):
        for counts, worker_id, change in changes[start]:
            counts[worker_id] += change
        doing, workers = between.at(start, end)
        if there := _present(computing):
            doing, workers = "computing", there
        elif there := _present(waiting):
            doing, workers = "waiting", there
        if result and (result[-1].doing, result[-1].workers) == (doing, workers):
            start = result.pop().start_us
        result.append(Tile(doing, start, end, workers))
    return result


def _times(step: StageSpan) -> tuple[int, int, int]:
    return step.ready_us, step.began_us, step.ended_us


def _present(counts: Counter[str]) -> tuple[str, ...]:
    return tuple(sorted(worker_id for worker_id, count in counts.items() if count > 0))


@dataclass(frozen=True, slots=True)
class _BoundedStep:
    """A step whose times are bounded to those of its run."""

    step: StageSpan
    ready_us: int
    began_us: int
    ended_us: int


class _Between:
    """Finds what is done while no stage has tokens of the request, from the step before and the next one."""

    def __init__(self, run: Span, steps: Sequence[_BoundedStep]) -> None:
        self._by_end = sorted(steps, key=lambda one: one.ended_us)
        self._by_ready = sorted(steps, key=lambda one: one.ready_us)
        self._ends = [one.ended_us for one in self._by_end]
        self._readies = [one.ready_us for one in self._by_ready]
        self._last_stage = max((one.step.stage for one in steps), default=0)
        self._failed = "blockrelay.rerun.reason" in run.attributes

    def at(self, start: int, end: int) -> tuple[Doing, tuple[str, ...]]:
        """The kind of a tile from `start` to `end`, in which nothing is computed and nothing waits, and its workers."""
        before, after = bisect_right(self._ends, start), bisect_left(self._readies, end)
        coming = self._by_ready[after].step if after < len(self._readies) else None
        if not before:
            return "claiming", (coming.worker_id,) if coming else ()
        last = self._by_end[before - 1].step
        if coming:
            return ("sending", (coming.worker_id,)) if coming.stage > last.stage else ("sampling", (last.worker_id,))
        if self._failed:
            return "silent", (last.worker_id,)
        return ("committing" if last.stage == self._last_stage else "sending"), (last.worker_id,)


def missing(steps: Iterable[StageSpan]) -> int:
    """Number of steps that are known to be lost: those before a later step of the same worker and run.

    Lost steps at the end of a run, or of a whole run, cannot be known.
    """
    numbers: dict[tuple[int, str], list[int]] = defaultdict(list)
    for step in steps:
        numbers[step.run, step.worker_id].append(step.number)
    return sum(max(some) + 1 - len(set(some)) for some in numbers.values())


def _run_of(step: StageSpan, runs: Sequence[Span], record: Mapping[bytes, bytes]) -> Span | None:
    """The span of the run of a step; None without runs.

    A record that has forgotten its oldest events shows its first runs as one.
    """
    ended = sum("blockrelay.rerun.reason" in run.attributes for run in runs)
    before = max(0, int(record.get(b"reruns", b"0")) - ended)
    return runs[min(max(step.run - before - 1, 0), len(runs) - 1)] if runs else None


def _span(request_id: str, parent: Span, step: StageSpan) -> Span:
    return Span(
        name="stage",
        span_id=span_id(request_id, f"stage/{step.run}/{step.worker_id}", step.number),
        parent_id=parent.span_id,
        start_us=step.began_us,
        end_us=step.ended_us,
        attributes={
            "blockrelay.stage": step.stage,
            "blockrelay.blocks": step.blocks,
            "blockrelay.worker": step.worker_id,
            "blockrelay.run": step.run,
            "blockrelay.kind": step.kind,
            "blockrelay.position": step.position,
            "blockrelay.rows": step.rows,
            "blockrelay.batch_rows": step.batch_rows,
            "blockrelay.waited_seconds": step.waited_us / 1e6,
            "blockrelay.computed_seconds": step.computed_us / 1e6,
        },
    )
