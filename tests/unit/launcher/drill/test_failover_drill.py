"""The drill on a Redis that fails over counts what was taken back: a gateway played by the test takes it back."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any

import pytest

from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_launcher.drill.clients import DrillLoad, Kind, RequestRecord
from blockrelay_launcher.drill.report import judge
from blockrelay_launcher.drill.workload import DrillRequest
from tests.support.beside import serving
from tests.support.failover_drill import load as failover_load
from tests.support.failover_drill.course import Verdict, longest_pause
from tests.support.failover_drill.load import FailoverLoad

NAME = "0" * 24


class Keyless(Random):
    """Draws a background request without a key."""

    def random(self) -> float:
        return 0.9


@dataclass
class Played:
    """A gateway: what it answers by method and the first two parts of a path, one after the other; the last stays."""

    answers: dict[str, list[tuple[int, dict[str, Any]]]]
    asked: list[str] = field(default_factory=list[str])
    url: str = ""

    def answer(self, method: str, path: str) -> tuple[int, dict[str, Any]]:
        what = f"{method} {'/'.join(path.split('/')[:3])}"
        self.asked.append(what)
        found = self.answers[what]
        return found.pop(0) if len(found) > 1 else found[0]


@pytest.fixture
def gateway() -> Iterator[Played]:
    played = Played({})

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            status, body = played.answer(self.command, self.path)
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = _answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    played.url = f"http://127.0.0.1:{server.server_port}"
    with serving(server):
        yield played


@pytest.fixture
def load(gateway: Played) -> FailoverLoad:
    ask = DrillRequest(prompt=(5, 6), params=SamplingParams(max_tokens=2), cuts=(1,))
    return FailoverLoad(urls=[gateway.url], requests=[ask], clients=1, rng=Random(1))


def seen_of(load: FailoverLoad, kind: Kind) -> RequestRecord:
    load.seen.append(RequestRecord(number=0, kind=kind, started=0.0))
    return load.seen[-1]


def verdict(load: FailoverLoad, *, replicas: int, taken_back: list[str], unasked: int = 0) -> Verdict:
    report = judge(load.seen, lambda *_: None, [], seconds=1.0)
    return Verdict(
        redis="sentinel",
        secured=False,
        replicas=replicas,
        report=report,
        by_cell={"c0": report.accepted},
        killed=1,
        planned=0,
        in_vain=0,
        unasked=unasked,
        slowest_failover_s=1.0,
        longest_pause_s=1.0,
        gone=load.gone,
        begun_again=load.begun_again,
        taken_back=taken_back,
    )


def test_a_request_without_a_key_that_nobody_knows_any_more_is_gone(
    gateway: Played, load: FailoverLoad, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover_load, "GONE_S", 0.0)
    gateway.answers = {"POST /v1/completions": [(202, {"id": f"cmpl-{NAME}"})], "GET /v1/requests": [(404, {})]}
    load._background([seen_of(load, "background")], {}, "key", Keyless(1))  # pyright: ignore[reportPrivateUsage]
    assert load.gone == [f"cmpl-{NAME}"] and not load.seen
    assert verdict(load, replicas=1, taken_back=[]).wrong == load.gone
    assert not verdict(load, replicas=0, taken_back=[]).wrong, "as the column everysec says"
    assert not verdict(load, replicas=1, taken_back=[], unasked=1).wrong, "the other replica has confirmed it"
    assert verdict(load, replicas=2, taken_back=[], unasked=1).wrong == load.gone


def test_one_that_is_unknown_for_a_while_is_not(gateway: Played, load: FailoverLoad) -> None:
    ended = {"status": "completed", "token_ids": [1], "text": "a", "finish_reason": "stop"}
    gateway.answers = {
        "POST /v1/completions": [(202, {"id": f"cmpl-{NAME}"})],
        "GET /v1/requests": [(404, {}), (200, {**ended, "system_fingerprint": "n", "error": None})],
    }
    seen = seen_of(load, "background")
    load._background([seen], {}, "key", Keyless(1))  # pyright: ignore[reportPrivateUsage]
    assert not load.gone and seen.tokens == [1] and seen.ended is not None


@pytest.mark.parametrize(("later", "state"), [((200, {"status": "completed"}), "completed"), ((404, {}), "forgotten")])
def test_a_cancellation_that_was_answered_must_stay(
    gateway: Played, load: FailoverLoad, later: tuple[int, dict[str, Any]], state: str
) -> None:
    gateway.answers = {"DELETE /v1/requests": [(503, {}), (200, {"status": "cancelled"})], "GET /v1/requests": [later]}
    seen = RequestRecord(number=0, kind="cancelled", started=0.0, request_id=f"req-{NAME}")
    load._delete(seen, Random(1))  # pyright: ignore[reportPrivateUsage]
    taken_back = load.no_longer_cancelled()
    assert taken_back == [f"req-{NAME} was cancelled and is {state}"]
    assert verdict(load, replicas=1, taken_back=taken_back).wrong == taken_back
    gateway.answers["GET /v1/requests"] = [(200, {"status": "cancelled"})]
    assert not load.no_longer_cancelled()


def test_what_is_forgotten_cannot_be_cancelled_and_its_stream_goes_on(
    gateway: Played, load: FailoverLoad, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover_load, "GONE_S", 0.0)
    gateway.answers = {"DELETE /v1/requests": [(404, {})]}
    load._delete(RequestRecord(number=0, kind="cancelled", started=0.0, request_id=f"req-{NAME}"), Random(1))  # pyright: ignore[reportPrivateUsage]
    assert not load.cancelled


@pytest.mark.parametrize("answers", [[(404, {})], [(503, {}), (200, {"status": "cancelled"})]])
def test_so_it_is_where_nothing_fails_over_but_room_is_short(
    gateway: Played, load: FailoverLoad, answers: list[tuple[int, dict[str, Any]]]
) -> None:
    gateway.answers = {"DELETE /v1/requests": answers}
    seen = RequestRecord(number=0, kind="cancelled", started=0.0, request_id=f"req-{NAME}")
    DrillLoad._delete(load, seen, Random(1))  # pyright: ignore[reportPrivateUsage]
    assert gateway.asked == ["DELETE /v1/requests"] * (1 if answers[0][0] == 404 else 2)


def test_a_session_that_forgot_a_step_begins_again_and_is_counted(gateway: Played, load: FailoverLoad) -> None:
    logits = {"_tensor_": True, "data": [[1.0]], "dtype": "float32", "shape": [1, 1]}
    answer = {"outputs": {"logits": logits}, "system_fingerprint": "n"}
    gateway.answers = {"POST /v1/infer": [(409, {"error": "step"}), (200, answer)]}
    seen = seen_of(load, "session")
    load._session(seen, "key", Random(1))  # pyright: ignore[reportPrivateUsage]
    assert len(load.begun_again) == 1 and len(seen.digests) == 1 and seen.ended is not None
    assert load.begun_again[0] in verdict(load, replicas=1, taken_back=[]).wrong


def test_the_longest_pause_is_what_a_stream_waited_for_an_event() -> None:
    streams = [[1.0, 1.5, 4.0], [1.0, 8.0]]
    seen = [RequestRecord(number=0, kind="stream", started=0.0, events=events) for events in streams]
    background = RequestRecord(number=0, kind="background", started=0.0, events=[1.0, 99.0])
    assert longest_pause([*seen, background]) == 7.0
    assert longest_pause([*seen, RequestRecord(number=0, kind="stream", started=-8.0, events=[1.0])]) == 9.0
