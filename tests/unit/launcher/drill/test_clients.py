"""Clients of a drill read several choices and tool calls from one stream, and what is wrong in it is found."""

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from random import Random
from typing import Any

import httpx
import pytest

from blockrelay.protocol.encoding.request_ids import public_id, sibling
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_launcher.client import resuming
from blockrelay_launcher.client.resuming import Refused, StreamEvent
from blockrelay_launcher.drill.chats import Call, DrillChat
from blockrelay_launcher.drill.clients import DrillLoad, RequestRecord, records_of
from blockrelay_launcher.drill.report import Report, judge
from blockrelay_launcher.drill.workload import DrillRequest, ReferenceAnswer

BASE = "cmpl-c0-" + "0" * 24
PARAMS = SamplingParams(max_tokens=2, seed=1)
CHAT = DrillChat(text="Hello", tools=("tell",), choice="required", form="hermes")
ASKS = [
    DrillRequest(prompt=(5,), params=PARAMS, others=(1,)),
    DrillRequest(prompt=(5,), params=SamplingParams(max_tokens=2, seed=2)),
    DrillRequest(prompt=(5,), params=PARAMS, chat=CHAT),
]
ANSWERS = [
    ReferenceAnswer(tokens=(5, 6), text="56", finish_reason="length"),
    ReferenceAnswer(tokens=(7, 8), text="78", finish_reason="length"),
    ReferenceAnswer(
        tokens=(1, 2, 3),
        text="(all)",
        content="Once",
        calls=(Call("tell", '{"x": 1}'), Call("ask", "{}")),
        finish_reason="tool_calls",
    ),
]
Event = tuple[str, dict[str, Any]]


def token(places: str, index: int, number: int) -> Event:
    choice = {"index": index, "token_ids": [number], "text": str(number)}
    return places, {"choices": [choice], "system_fingerprint": "own"}


def end(places: str, index: int, reason: str = "length") -> Event:
    choice = {"index": index, "token_ids": [], "finish_reason": reason}
    return places, {"choices": [choice], "system_fingerprint": "own"}


TWO = [token("1.0", 0, 5), token("1.1", 1, 7), token("1.2", 1, 8), token("2.2", 0, 6), end("2.3", 1), end("3.3", 0)]


def called(place: str, number: int, *parts: dict[str, Any], content: str | None = None) -> Event:
    delta = ({"content": content} if content else {}) | ({"tool_calls": list(parts)} if parts else {})
    choice = {"index": 0, "delta": delta, "token_ids": [number]}
    return place, {"choices": [choice], "system_fingerprint": "own"}


def begun(index: int, name: str, arguments: str = "") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call-{index}", "type": "function", "function": function}


def more(index: int, arguments: str) -> dict[str, Any]:
    return {"index": index, "function": {"arguments": arguments}}


def calling() -> list[Event]:
    """The events of a chat, which a test may change."""
    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    last = {"index": 0, "delta": {}, "token_ids": [], "finish_reason": "tool_calls"}
    return deepcopy(
        [
            ("0", {"choices": [opening], "system_fingerprint": None}),
            called("1", 1, begun(0, "tell", '{"x"'), content="Once"),
            called("2", 2, more(0, ": 1}")),
            called("3", 3, begun(1, "ask", "{}")),
            ("4", {"choices": [last], "system_fingerprint": "own"}),
        ]
    )


class Streamed:
    """Plays the streams of gateways, one after the other; the last one stays."""

    def __init__(self, *streams: list[Event]) -> None:
        self.streams, self.asked = list(streams), list[tuple[str, dict[str, Any], str]]()

    def __call__(self, urls: object, path: str, body: dict[str, Any], *, key: str, **_: Any) -> Iterator[StreamEvent]:
        self.asked.append((path, body, key))
        for places, data in self.streams.pop(0) if len(self.streams) > 1 else self.streams[0]:
            yield StreamEvent(f"{BASE}:{places}", data)


Play = Callable[..., tuple[list[RequestRecord], Streamed]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    def played(number: int, *streams: list[Event], kind: Any = "stream") -> tuple[list[RequestRecord], Streamed]:
        streamed = Streamed(*streams)
        monkeypatch.setattr(resuming, "resuming_stream", streamed)
        load = DrillLoad(urls=["http://one"], requests=ASKS, clients=1, rng=Random(1))
        choices = records_of(number, ASKS[number], kind)
        load._stream(choices, ASKS[number].body(), "key", Random(1))  # pyright: ignore[reportPrivateUsage]
        return choices, streamed

    return played


def verdict(choices: list[RequestRecord]) -> Report:
    return judge(choices, lambda number, fingerprint: ANSWERS[number], [], seconds=1.0)


def test_each_choice_is_a_request_with_the_answer_that_it_has_alone(play: Play) -> None:
    choices, streamed = play(0, TWO)
    report = verdict(choices)
    assert report.good and (report.accepted, report.completed, report.choices, report.tokens) == (2, 2, 2, 4)
    other = public_id(sibling("req-" + "0" * 24, 1), "c0")
    assert [one.request_id for one in choices] == [BASE, other]
    assert [one.number for one in choices] == [0, 1] and len(streamed.asked) == 1
    assert streamed.asked[0][0] == "/v1/completions" and streamed.asked[0][1]["n"] == 2


def test_a_wrong_token_of_a_further_choice_is_found(play: Play) -> None:
    report = verdict(play(0, [*TWO[:2], token("1.2", 1, 9), *TWO[3:]])[0])
    assert (report.mismatched, report.completed) == (1, 1)
    assert "choice 1): token 2 differs" in report.wrong[0]


@pytest.mark.parametrize("again", [1, 2, 3])
def test_an_event_that_comes_twice_is_found_by_the_position_of_its_choice(play: Play, again: int) -> None:
    report = verdict(play(0, [*TWO[: again + 1], TWO[again], *TWO[again + 1 :]])[0])
    assert report.duplicated == 1 and not report.good and report.completed == 2


def test_one_that_comes_again_behind_those_of_other_choices_is_found_too(play: Play) -> None:
    assert verdict(play(0, [*TWO[:4], TWO[1], *TWO[4:]])[0]).duplicated > 0


@pytest.mark.parametrize("missing", [0, 1, 3, 4])
def test_an_event_that_does_not_come_is_found(play: Play, missing: int) -> None:
    choices, _ = play(0, [*TWO[:missing], *TWO[missing + 1 :]])
    report = verdict(choices)
    assert sum(one.missing for one in choices) > 0 and report.mismatched > 0 and not report.good


def test_the_end_of_a_cancelled_choice_is_its_own(play: Play) -> None:
    gone = {"error": {"message": "the request was cancelled"}}
    choices, _ = play(0, [*TWO[:3], ("2.2", gone), end("2.3", 1)], kind="stream")
    assert [one.error for one in choices] == ["the request was cancelled", ""]
    assert [one.finish_reason for one in choices] == ["", "length"]


def test_an_id_with_another_number_of_positions_is_no_event(play: Play) -> None:
    with pytest.raises(ValueError, match="zip"):
        play(0, [token("1", 0, 5)])


def test_a_chat_is_read_twice_and_its_calls_are_joined(play: Play) -> None:
    choices, streamed = play(2, calling())
    report = verdict(choices)
    assert report.good and (report.completed, report.calls) == (1, 2)
    assert [path for path, _, _ in streamed.asked] == ["/v1/chat/completions"] * 2
    assert len({key for _, _, key in streamed.asked}) == 1 and "prompt" not in streamed.asked[0][1]
    assert choices[0].content == "Once" and choices[0].read_again == choices[0].calls


def argument(events: list[Event]) -> None:
    events[2][1]["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"] = ": 2}"


def name(events: list[Event]) -> None:
    events[3][1]["choices"][0]["delta"]["tool_calls"][0]["function"]["name"] = "tell"


def same_id(events: list[Event]) -> None:
    events[3][1]["choices"][0]["delta"]["tool_calls"][0]["id"] = "call-0"


def content(events: list[Event]) -> None:
    events[1][1]["choices"][0]["delta"]["content"] = "Twice"


def without(events: list[Event]) -> None:
    del events[3][1]["choices"][0]["delta"]["tool_calls"]


def reason(events: list[Event]) -> None:
    events[4][1]["choices"][0]["finish_reason"] = "stop"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (argument, "an argument of call 1 differs"),
        (name, "the name of call 2 differs"),
        (same_id, "no ids of their own"),
        (content, "the text differs"),
        (without, "1 calls instead of 2"),
        (reason, "it ended as 'stop'"),
    ],
)
def test_a_wrong_part_of_a_call_is_found(play: Play, change: Callable[[list[Event]], None], told: str) -> None:
    events = calling()
    change(events)
    report = verdict(play(2, events)[0])
    assert report.mismatched == 1 and told in report.wrong[0]


def test_ids_that_change_when_a_stream_is_read_again_are_found(play: Play) -> None:
    again = calling()
    again[3][1]["choices"][0]["delta"]["tool_calls"][0]["id"] = "call-9"
    report = verdict(play(2, calling(), again)[0])
    assert report.mismatched == 1 and "when they are read again" in report.wrong[0]


def test_a_part_of_a_call_that_did_not_begin_is_no_event(play: Play) -> None:
    with pytest.raises(ValueError, match="a part of call 2 came behind 1 calls"):
        play(2, [*calling()[:2], called("2", 2, more(1, "{}"))])


def test_a_background_body_is_polled_choice_by_choice() -> None:
    asked = list[str]()

    class Answered(DrillLoad):
        def _ask(self, method: str, path: str, rng: Random, *_: Any, **__: Any) -> httpx.Response:
            asked.append(f"{method} {path}")
            if method == "POST":
                return httpx.Response(202, content=json.dumps({"id": BASE}))
            right = ANSWERS[0 if path.endswith(BASE) else 1]
            state = {"status": "completed", "token_ids": right.tokens, "text": right.text, "finish_reason": "length"}
            return httpx.Response(200, json={**state, "system_fingerprint": "own", "error": None})

    load = Answered(urls=["http://one"], requests=ASKS, clients=1, rng=Random(1))
    choices = records_of(0, ASKS[0], "background")
    load._background(choices, ASKS[0].body(), "key", Random(1))  # pyright: ignore[reportPrivateUsage]
    assert verdict(choices).good and asked[1:] == [f"GET /v1/requests/{one.request_id}" for one in choices]


def test_a_body_that_is_refused_is_one_for_each_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(DrillLoad):
        def _ask(self, method: str, path: str, rng: Random, *_: Any, **__: Any) -> httpx.Response:
            raise Refused(400, "no")

    def refuse(*_: object, **__: object) -> Iterator[StreamEvent]:
        load.finish()
        raise Refused(400, "no")

    load = Refusing(urls=[], requests=ASKS, clients=1, rng=Random(1))
    load.left_out |= {1, 2}
    monkeypatch.setattr(resuming, "resuming_stream", refuse)
    load._client(Random(2))  # pyright: ignore[reportPrivateUsage]
    assert [one.number for one in load.seen[-2:]] == [0, 1]
    assert all("refused: 400" in one.error for one in load.seen)
    assert verdict(load.seen).refused == len(load.seen)
