"""The spans of a request are a function of its record: nested, in order, the same in every process."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockrelay.protocol.messages import EndEntry, EndReason, RequestBody
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_gateway.tracing.spans import Span, TraceIdentity, request_spans

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def spans_of(
    notes: str,
    *,
    reason: EndReason = "stop",
    accepted_ms: int = 1000,
    end_ms: int = 2000,
    traceparent: str = "",
    meta: dict[str, object] | None = None,
    **more: str,
) -> list[Span]:
    params = SamplingParams(max_tokens=8, temperature=0.5, seed=3)
    body = RequestBody(
        prompt=np.arange(1, 6, dtype=np.int32), params=params.to_dict(), traceparent=traceparent, session="talk", step=2
    )
    record = {
        "accepted_ms": str(accepted_ms), "progress_ms": str(end_ms), "committed": "4", "end": reason, "notes": notes
    } | more  # fmt: skip
    encoded = {name.encode(): value.encode() for name, value in record.items()} | {b"body": body.encode()}
    return request_spans(
        "req-1", encoded, EndEntry(5, reason, meta or {}, (), "cpu-1"), model="tiny", cell="c0"
    )  # fmt: skip


def lengths(spans: list[Span]) -> list[tuple[str, int, int]]:
    return [(span.name, span.start_us // 1000, span.end_us // 1000) for span in spans]


def test_a_request_waits_is_computed_and_ends() -> None:
    whole, *parts = spans_of("1100ccpu;1300t;", meta={"route": ["w1", "w2"], "cached_tokens": 4})
    assert lengths([whole]) == [("text_completion tiny", 1000, 2000)]
    assert lengths(parts) == [
        ("queue", 1000, 1100), ("run", 1100, 2000), ("prefill", 1100, 1300), ("decode", 1300, 2000)
    ]  # fmt: skip
    queue, run, prefill, decode = parts
    assert {queue.parent_id, run.parent_id} == {whole.span_id}
    assert {prefill.parent_id, decode.parent_id} == {run.span_id}
    assert run.attributes == {"blockrelay.route_class": "cpu", "blockrelay.route": ["w1", "w2"]}
    assert whole.attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "blockrelay",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "req-1",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.time_to_first_chunk": 0.3,
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.seed": 3,
        "gen_ai.conversation.id": "talk",
        "blockrelay.step": 2,
        "blockrelay.background": False,
        "blockrelay.cell": "c0",
        "blockrelay.numerics_id": "cpu-1",
        "blockrelay.runs": 1,
    }
    assert not [span for span in (whole, *parts) if span.error]


def test_a_run_that_died_is_shown_and_the_next_one_says_whose_place_it_takes() -> None:
    notes = "1100cgpu;1300t;1400fblock_1;1500rdeath@3;1550ccpu;1550nother@3;"
    whole, *parts = spans_of(notes, reason="length")
    assert lengths(parts) == [
        ("queue", 1000, 1100), ("run", 1100, 1500), ("prefill", 1100, 1300), ("decode", 1300, 1500),
        ("queue", 1500, 1550), ("run", 1550, 2000),
    ]  # fmt: skip
    died, again = parts[1], parts[5]
    assert (died.error, died.attributes["blockrelay.rerun.reason"]) == ("death", "death")
    assert [(event.name, event.at_us) for event in died.events] == [("fallback", 1_400_000)]
    assert died.events[0].attributes == {"blockrelay.block_id": "block_1"}
    assert [event.name for event in again.events] == ["numerics_changed"]
    assert parts[4].after == again.after == died.span_id
    assert (whole.attributes["blockrelay.runs"], whole.error) == (2, "")


def test_a_drain_is_no_error() -> None:
    died = spans_of("1100ccpu;1500rdrain@0;1550ccpu;")[2]
    assert (died.name, died.error, died.attributes["blockrelay.rerun.reason"]) == ("run", "", "drain")


@pytest.mark.parametrize(
    ("reason", "meta", "error"),
    [
        ("error", {"error": "it does not fit", "code": "wire"}, "wire"),
        ("error", {"error": "nobody knows"}, "error"),
        ("expired", {}, "expired"),
        ("cancelled", {}, ""),
        ("length", {}, ""),
    ],
)
def test_only_what_failed_is_an_error(reason: EndReason, meta: dict[str, object], error: str) -> None:
    whole, *parts = spans_of("", reason=reason, meta=meta)
    assert whole.error == error
    assert lengths(parts) == [("queue", 1000, 2000)]  # nobody ever took it


def test_the_first_run_is_there_when_its_note_is_not() -> None:
    parts = spans_of("1500rdeath@3;1600ccpu;", claimed_ms="1100", first_token_ms="1200")[1:]
    assert lengths(parts)[:3] == [("queue", 1000, 1100), ("run", 1100, 1500), ("prefill", 1100, 1200)]


def test_spans_are_of_the_clients_trace_or_of_one_of_their_own() -> None:
    asked = TraceIdentity.of("req-1", TRACEPARENT)
    assert (asked.trace_id, asked.parent_id) == (TRACEPARENT[3:35], TRACEPARENT[36:52])
    assert spans_of("", traceparent=TRACEPARENT)[0].parent_id == asked.parent_id
    own = TraceIdentity.of("req-1", "")
    assert (own.parent_id, own.traceparent, len(own.trace_id)) == ("", "", 32)
    assert own == TraceIdentity.of("req-1", "") != TraceIdentity.of("req-2", "")
    assert spans_of("")[0].parent_id == ""


EVENTS = st.sampled_from(["ccpu", "cgpu", "t", "rdeath@0", "rdrain@2", "rstalled@3=id", "fblock_2", "nid@1"])


@given(st.lists(st.tuples(st.integers(900, 2100), EVENTS), max_size=20), st.integers(900, 2100))
def test_whatever_a_record_says_spans_nest_and_follow_each_other(noted: list[tuple[int, str]], end_ms: int) -> None:
    notes = "".join(f"{at}{what};" for at, what in noted)
    spans = spans_of(notes, end_ms=end_ms)
    assert spans == spans_of(notes, end_ms=end_ms)
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    for span in spans:
        assert span.start_us <= span.end_us
        if span.parent_id:
            parent = by_id[span.parent_id]
            assert parent.start_us <= span.start_us <= span.end_us <= parent.end_us
        assert not span.after or by_id[span.after].name == "run"
    direct = [span for span in spans if span.parent_id == spans[0].span_id]
    assert all(first.end_us <= second.start_us for first, second in pairwise(direct))
