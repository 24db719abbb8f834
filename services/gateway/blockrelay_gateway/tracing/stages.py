"""What stages told of a request (`StageSpan`), as spans below its runs; and where the time of a run went. Pure.

At each moment of a run some stage computes rows of the request, or rows of it wait in some stage, or they are passed
on: claimed, sampled, sent to the next stage, committed. So the three tile the run, whatever ran beside each other.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from blockrelay.protocol.encoding.stage_span import StageSpan
from blockrelay_gateway.tracing.spans import Span, span_id

Doing = Literal["computing", "waiting", "passing_on"]


@dataclass(frozen=True, slots=True)
class Tile:
    """What became of a request in a part of its run. Unix microseconds."""

    doing: Doing
    start_us: int
    end_us: int


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
    changes: dict[int, list[int]] = {run.start_us: [0, 0], run.end_us: [0, 0]}
    for step in steps:
        for at, computing, waiting in ((step.ready_us, 0, 1), (step.began_us, 1, -1), (step.ended_us, -1, 0)):
            change = changes.setdefault(min(max(at, run.start_us), run.end_us), [0, 0])
            change[0] += computing
            change[1] += waiting
    found: list[Tile] = []
    computing = waiting = 0
    for start, end in pairwise(sorted(changes)):
        computing += changes[start][0]
        waiting += changes[start][1]
        doing: Doing = "computing" if computing else "waiting" if waiting else "passing_on"
        if found and found[-1].doing == doing:
            start = found.pop().start_us
        found.append(Tile(doing, start, end))
    return found


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
