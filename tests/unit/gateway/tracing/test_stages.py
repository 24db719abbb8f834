"""Recorded steps of stages become spans below their runs, tiles of these, and a file that trace viewers open."""

import json
from itertools import pairwise
from typing import Any, get_args

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from blockrelay.protocol.encoding.stage_span import Kind, StageSpan
from blockrelay.protocol.messages import EndEntry, RequestBody
from blockrelay_gateway.tracing.perfetto import trace_events
from blockrelay_gateway.tracing.spans import Span, request_spans
from blockrelay_gateway.tracing.stages import Doing, missing, stages_of, tiles

#: Two runs: a worker died.
NOTES = "1100ccpu;1300t;1500rdeath@3;1550ccpu;"


def record_of(notes: str = NOTES, *, end_ms: int = 2000, reruns: int = 1) -> dict[bytes, bytes]:
    body = RequestBody(prompt=np.arange(1, 6, dtype=np.int32), params={}, traced=True)
    fields = {"accepted_ms": 1000, "progress_ms": end_ms, "committed": 4, "notes": notes, "reruns": reruns}
    return {name.encode(): str(value).encode() for name, value in fields.items()} | {b"body": body.encode()}


def spans_of(record: dict[bytes, bytes], *, now_ms: int = 0) -> list[Span]:
    """The spans of a request that has ended, or that still runs at `now_ms`."""
    if now_ms:
        return request_spans("req-1", record, None, model="tiny", cell="c0", now_ms=now_ms)
    end = EndEntry(5, "stop", {}, (), "cpu-1")
    return request_spans("req-1", record | {b"end": b"stop"}, end, model="tiny", cell="c0")


def step(
    ready_ms: float, waited_ms: float, computed_ms: float, *,
    run: int = 1, worker_id: str = "a", stage: int = 0, number: int = 0, kind: Kind = "decode",
) -> StageSpan:  # fmt: skip
    return StageSpan(
        run=run, worker_id=worker_id, stage=stage, first=2 * stage + 1, last=2 * stage + 2, number=number, kind=kind,
        position=4, rows=1, batch_rows=3,
        ready_us=int(1000 * ready_ms), waited_us=int(1000 * waited_ms), computed_us=int(1000 * computed_ms),
    )  # fmt: skip


#: Two stages of the first run, of which the second one died with its last steps, and one of the second run.
STEPS = [
    step(1101, 9, 90, kind="prefill"),
    step(1205, 5, 40, worker_id="b", stage=1, kind="prefill"),
    step(1310, 0, 50, number=1),
    step(1560, 40, 300, run=2, worker_id="c"),
]


def test_a_step_is_a_span_below_its_run() -> None:
    record = record_of()
    spans = spans_of(record)
    first, second = [span for span in spans if span.name == "run"]
    stages = stages_of("req-1", spans, reversed(STEPS), record)
    assert [span.parent_id for span in stages.spans] == [first.span_id] * 3 + [second.span_id]
    assert stages.spans[1].attributes == {
        "blockrelay.stage": 1,
        "blockrelay.blocks": "3-4",
        "blockrelay.worker": "b",
        "blockrelay.run": 1,
        "blockrelay.kind": "prefill",
        "blockrelay.position": 4,
        "blockrelay.rows": 1,
        "blockrelay.batch_rows": 3,
        "blockrelay.waited_seconds": 0.005,
        "blockrelay.computed_seconds": 0.04,
    }
    assert (stages.spans[1].start_us, stages.spans[1].end_us) == (1_210_000, 1_250_000)
    assert spans[0].attributes["blockrelay.stage_steps"] == 4
    assert spans[0].attributes["blockrelay.stage_steps.missing"] == 0
    again = stages_of("req-1", spans_of(record), STEPS, record)
    assert again == stages, "whoever derives them writes the same"
    assert len({span.span_id for span in (*spans, *stages.spans)}) == len(spans) + 4


def test_a_run_says_where_its_time_went() -> None:
    record = record_of()
    spans = spans_of(record)
    stages = stages_of("req-1", spans, STEPS, record)
    first, second = [span for span in spans if span.name == "run"]
    spent = {doing: first.attributes[f"blockrelay.{doing}_seconds"] for doing in get_args(Doing)}
    assert spent == {
        "computing": 0.18,
        "waiting": 0.014,
        "claiming": 0.001,
        "sending": 0.005,
        "sampling": 0.06,
        "committing": 0.0,
        "silent": 0.14,
    }
    assert [(tile.doing, tile.start_us, tile.workers) for tile in stages.tiles] == [
        ("claiming", 1_100_000, ("a",)),
        ("waiting", 1_101_000, ("a",)),
        ("computing", 1_110_000, ("a",)),
        ("sending", 1_200_000, ("b",)),
        ("waiting", 1_205_000, ("b",)),
        ("computing", 1_210_000, ("b",)),
        ("sampling", 1_250_000, ("b",)),
        ("computing", 1_310_000, ("a",)),
        ("silent", 1_360_000, ("a",)),
        ("claiming", 1_550_000, ("c",)),
        ("waiting", 1_560_000, ("c",)),
        ("computing", 1_600_000, ("c",)),
        ("committing", 1_900_000, ("c",)),
    ]
    assert second.attributes["blockrelay.computing_seconds"] == 0.3


TIMES = st.floats(900, 2100)


@given(st.lists(st.tuples(TIMES, st.floats(0, 300), st.floats(0, 300))))
def test_tiles_leave_no_gap_whatever_stages_say(said: list[tuple[float, float, float]]) -> None:
    run = spans_of(record_of("1100ccpu;", reruns=0))[2]
    steps = [step(*times, number=number) for number, times in enumerate(said)]
    found = tiles(run, steps)
    assert (found[0].start_us, found[-1].end_us) == (run.start_us, run.end_us)
    for before, after in pairwise(found):
        assert before.end_us == after.start_us
        assert (before.doing, before.workers) != (after.doing, after.workers)
    assert all(tile.start_us < tile.end_us for tile in found)
    for tile in found:
        middle = (tile.start_us + tile.end_us) / 2
        computing = any(one.began_us <= middle < one.ended_us for one in steps)
        waiting = any(one.ready_us <= middle < one.began_us for one in steps)
        if computing or waiting:
            assert (tile.doing, tile.workers) == ("computing" if computing else "waiting", ("a",))
        else:
            assert tile.doing in ("claiming", "sampling", "committing")


def test_steps_that_were_lost_are_counted() -> None:
    steps = [step(1200, 0, 1, number=number) for number in (2, 3, 5)] + [step(1300, 0, 1, worker_id="b", number=0)]
    assert missing(steps) == 3
    assert missing(steps + steps) == 3


def test_a_record_that_has_forgotten_its_first_notes_still_has_the_right_run() -> None:
    notes = "1500rdeath@3;1600ccpu;"  # the third re-run, and the fourth run
    record = record_of(notes, reruns=3) | {b"claimed_ms": b"1100"}
    spans = spans_of(record)
    first, last = [span for span in spans if span.name == "run"]
    some = [step(1200 + 100 * run, 0, 1, run=run) for run in (1, 2, 3, 4)]
    found = stages_of("req-1", spans, some, record)
    assert [span.parent_id for span in found.spans] == [first.span_id] * 3 + [last.span_id]


def test_steps_of_a_request_whose_run_nobody_knows_are_its_own() -> None:
    record = record_of("", reruns=0)
    spans = spans_of(record)
    (made,) = stages_of("req-1", spans, [STEPS[0]], record).spans
    assert made.parent_id == spans[0].span_id


def test_a_request_that_runs_is_shown_so_far() -> None:
    record = record_of()
    whole, *parts = spans_of(record, now_ms=1700)
    assert whole.end_us == parts[-1].end_us == 1_700_000
    assert "gen_ai.response.finish_reasons" not in whole.attributes
    direct = [span for span in parts if span.parent_id == whole.span_id]
    assert [span.name for span in direct] == ["queue", "run", "queue", "run"]
    assert sum(span.end_us - span.start_us for span in direct) == whole.end_us - whole.start_us


def test_the_file_has_a_track_of_the_request_and_one_for_each_worker() -> None:
    record = record_of()
    spans = spans_of(record)
    file = trace_events("req-c0-1", spans, stages_of("req-1", spans, STEPS, record))
    assert json.loads(json.dumps(file)) == file
    events: list[dict[str, Any]] = file["traceEvents"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(tracks.values()) == [
        "queue and runs", "where it was",
        "stage 0, blocks 1-2: a", "stage 0, blocks 1-2: c", "stage 1, blocks 3-4: b",
    ]  # fmt: skip
    slices = [e for e in events if e["ph"] == "X"]
    named = [e["name"] for e in slices if tracks[e["pid"], e["tid"]] == "queue and runs"]
    assert named == ["text_completion tiny", "queue", "run 1", "prefill", "decode", "queue", "run 2"]
    assert [e["name"] for e in events if e["ph"] == "i"] == ["runs again: death"]
    assert sum(e["name"] == "computing" for e in slices) == 4
    for track in tracks:
        own = sorted((e["ts"], -e["dur"]) for e in slices if (e["pid"], e["tid"]) == track)
        open_until: list[int] = []
        for start, negative in own:
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or start - negative <= open_until[-1], "slices nest or follow each other"
            open_until.append(start - negative)
