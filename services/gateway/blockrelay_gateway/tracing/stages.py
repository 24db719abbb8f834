"""What stages told of a request (`StageSpan`), as spans below its runs; and where the time of a run went. Pure.

At each moment of a run some stage computes rows of the request, or rows of it wait in some stage, or it is between two
steps, which say what is done there. So these tile the run, whatever ran beside each other.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from blockrelay.protocol.encoding.stage_span import StageSpan
from blockrelay_gateway.tracing.spans import Span, span_id

#: `claiming`: a worker has it and nothing to compute yet. `sending`: to the next stage. `sampling`: until the first one
#: knows the token. `committing`: behind the last step. `silent`: behind the last step that a failed run told.
Doing = Literal["computing", "waiting", "claiming", "sending", "sampling", "committing", "silent"]


@dataclass(frozen=True, slots=True)
class Tile:
    """What became of a request in a part of its run, and with whom. Unix microseconds."""

    doing: Doing
    start_us: int
    end_us: int
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stages:
    """`spans`: one for each step, by when they began. `tiles` of all runs that have steps, in order."""

    spans: list[Span]
    tiles: list[Tile]


def stages_of(request: str, spans: Sequence[Span], steps: Iterable[StageSpan], record: Mapping[bytes, bytes]) -> Stages:
    """Mutates `spans`, those of `request_spans`: each run says where its time went, the request how many steps are here
    and how many are known to be missing."""
    whole, *_ = spans
    runs = [span for span in spans if span.name == "run"]
    under: dict[str, list[StageSpan]] = defaultdict(list)
    made: list[Span] = []
    found: list[Tile] = []
    for step in sorted(steps, key=lambda step: (step.began_us, step.stage)):
        parent = _run_of(step, runs, record) or whole
        under[parent.span_id].append(step)
        made.append(_span(request, parent, step))
    for run in [run for run in runs if run.span_id in under]:
        spent = dict.fromkeys(get_args(Doing), 0)
        for tile in (found_here := tiles(run, under[run.span_id])):
            spent[tile.doing] += tile.end_us - tile.start_us
        found += found_here
        run.attributes |= {f"blockrelay.{doing}_seconds": us / 1e6 for doing, us in spent.items()}
    whole.attributes["blockrelay.stage_steps"] = len(made)
    whole.attributes["blockrelay.stage_steps.missing"] = missing(step for some in under.values() for step in some)
    return Stages(made, found)


def tiles(run: Span, steps: Iterable[StageSpan]) -> list[Tile]:
    """What became of the request from the beginning of `run` to its end, without a gap; `steps` of that run."""
    told = [_Told(step, *(min(max(at, run.start_us), run.end_us) for at in _times(step))) for step in steps]
    changes: dict[int, list[tuple[Counter[str], str, int]]] = {run.start_us: [], run.end_us: []}
    computing, waiting = Counter[str](), Counter[str]()
    for one in told:
        changes.setdefault(one.ready_us, []).append((waiting, one.step.worker, 1))
        changes.setdefault(one.began_us, []).extend([(waiting, one.step.worker, -1), (computing, one.step.worker, 1)])
        changes.setdefault(one.ended_us, []).append((computing, one.step.worker, -1))
    between = _Between(run, told)
    found: list[Tile] = []
    for start, end in pairwise(sorted(changes)):
        for counts, worker, change in changes[start]:
            counts[worker] += change
        doing, workers = between.at(start, end)
        if there := _present(computing):
            doing, workers = "computing", there
        elif there := _present(waiting):
            doing, workers = "waiting", there
        if found and (found[-1].doing, found[-1].workers) == (doing, workers):
            start = found.pop().start_us
        found.append(Tile(doing, start, end, workers))
    return found


def _times(step: StageSpan) -> tuple[int, int, int]:
    return step.ready_us, step.began_us, step.ended_us


def _present(counts: Counter[str]) -> tuple[str, ...]:
    return tuple(sorted(worker for worker, count in counts.items() if count > 0))


@dataclass(frozen=True, slots=True)
class _Told:
    """A step, its times within its run."""

    step: StageSpan
    ready_us: int
    began_us: int
    ended_us: int


class _Between:
    """What is done while no stage has rows of the request: it follows from the step before, and from the next one."""

    def __init__(self, run: Span, told: Sequence[_Told]) -> None:
        self._by_end = sorted(told, key=lambda one: one.ended_us)
        self._by_ready = sorted(told, key=lambda one: one.ready_us)
        self._ends = [one.ended_us for one in self._by_end]
        self._readies = [one.ready_us for one in self._by_ready]
        self._last_stage = max((one.step.stage for one in told), default=0)
        self._failed = "blockrelay.rerun.reason" in run.attributes

    def at(self, start: int, end: int) -> tuple[Doing, tuple[str, ...]]:
        """From `start` to `end`, where nothing is computed and nothing waits; and whose work it is."""
        before, after = bisect_right(self._ends, start), bisect_left(self._readies, end)
        coming = self._by_ready[after].step if after < len(self._readies) else None
        if not before:
            return "claiming", (coming.worker,) if coming else ()
        last = self._by_end[before - 1].step
        if coming:
            return ("sending", (coming.worker,)) if coming.stage > last.stage else ("sampling", (last.worker,))
        if self._failed:
            return "silent", (last.worker,)
        return ("committing" if last.stage == self._last_stage else "sending"), (last.worker,)


def missing(steps: Iterable[StageSpan]) -> int:
    """How many steps were lost before later ones of the same worker and run; what came last, or of whole runs, nobody
    knows."""
    numbers: dict[tuple[int, str], list[int]] = defaultdict(list)
    for step in steps:
        numbers[step.run, step.worker].append(step.number)
    return sum(max(some) + 1 - len(set(some)) for some in numbers.values())


def _run_of(step: StageSpan, runs: Sequence[Span], record: Mapping[bytes, bytes]) -> Span | None:
    """A record that has forgotten its oldest notes shows its first runs as one."""
    ended = sum("blockrelay.rerun.reason" in run.attributes for run in runs)
    before = max(0, int(record.get(b"reruns", b"0")) - ended)
    return runs[min(max(step.run - before - 1, 0), len(runs) - 1)] if runs else None


def _span(request: str, parent: Span, step: StageSpan) -> Span:
    return Span(
        name="stage",
        span_id=span_id(request, f"stage/{step.run}/{step.worker}", step.number),
        parent_id=parent.span_id,
        start_us=step.began_us,
        end_us=step.ended_us,
        attributes={
            "blockrelay.stage": step.stage,
            "blockrelay.blocks": step.blocks,
            "blockrelay.worker": step.worker,
            "blockrelay.run": step.run,
            "blockrelay.kind": step.kind,
            "blockrelay.position": step.position,
            "blockrelay.rows": step.rows,
            "blockrelay.batch_rows": step.batch_rows,
            "blockrelay.waited_seconds": step.waited_us / 1e6,
            "blockrelay.computed_seconds": step.computed_us / 1e6,
        },
    )
