"""The client that survives gateways, against a server that does everything wrong once."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockrelay_launcher.client.resuming import Refused, StreamEvent, read_events, resuming_stream


class Script:
    """A server that gives each connection the next of `answers`, cuts it, and keeps what it was asked."""

    def __init__(self, answers: list[bytes]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.asked: list[dict[str, str]] = []
        self._answers = answers
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        for answer in self._answers:
            connection, _ = self._listener.accept()
            with connection:
                request = connection.recv(1 << 16)
                head, _, body = request.partition(b"\r\n\r\n")
                while not body:
                    body = connection.recv(1 << 16)
                fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
                self.asked.append({name.lower(): value for name, value in fields.items()})
                connection.sendall(answer)

    def close(self) -> None:
        self._thread.join(10)
        self._listener.close()


@contextmanager
def served(*answers: bytes) -> Iterator[Script]:
    script = Script(list(answers))
    try:
        yield script
    finally:
        script.close()


def http(status: int, body: bytes = b"{}", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def sse(*events: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\nContent-Length: 100000\r\n\r\n"
    return head + b"retry: 1000\n" + b"".join(events)


def event(at: int) -> bytes:
    return b'id: req-1:%d\ndata: {"n":%d}\n\n' % (at, at)


DONE = b"data: [DONE]\n\n"


def test_it_goes_on_behind_the_last_whole_event_whatever_happens() -> None:
    shutdown = b'data: {"error":{"message":"this gateway shuts down"}}\n\n' + DONE
    reasons: list[str] = []
    with served(
        b"",  # dies between ACCEPT and its answer
        http(503, Retry_After="0"),
        http(429, Retry_After="0.01"),
        sse(event(1), b": keep-alive\n", event(2), b'id: req-1:3\ndata: {"n"'),  # cut in the middle of an event
        sse(event(3), shutdown),
        sse(event(4), DONE),
    ) as server:
        stream = resuming_stream([server.url], "/v1/completions", {"prompt": "x"}, key="k", retrying=reasons.append)
        events = list(stream)
    assert events == [StreamEvent(f"req-1:{at}", {"n": at}) for at in (1, 2, 3, 4)]
    assert {ask["idempotency-key"] for ask in server.asked} == {"k"}
    assert [ask.get("last-event-id") for ask in server.asked] == [None] * 4 + ["req-1:2", "req-1:3"]
    assert len(reasons) == 5


def test_it_tries_every_gateway_in_turn() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with served(sse(event(1), DONE)) as server:
        assert len(list(resuming_stream([nobody, server.url], "/v1/completions", {}))) == 1


def test_an_end_that_is_an_error_is_an_event_and_no_reason_to_try_again() -> None:
    end = b'id: req-1:2\ndata: {"error":{"code":"expired"}}\n\n'
    with served(sse(event(1), end, DONE)) as server:
        *_, last = resuming_stream([server.url], "/v1/completions", {})
    assert last.data["error"]["code"] == "expired" and len(server.asked) == 1


@pytest.mark.parametrize("status", [400, 401, 404, 422, 500])
def test_a_refusal_for_good_is_raised_at_once(status: int) -> None:
    with served(http(status, b'{"error":{"message":"no"}}')) as server, pytest.raises(Refused) as refused:
        list(resuming_stream([server.url], "/v1/completions", {}))
    assert refused.value.status == status and json.loads(refused.value.error)["error"]["message"] == "no"


def test_its_patience_ends() -> None:
    with served() as server, pytest.raises(Refused):
        list(resuming_stream([server.url.replace("127.0.0.1", "127.0.0.2")], "/v1/completions", {}, patience_s=0.2))


def test_it_says_which_request_a_gateway_has_accepted_and_uses_the_client_that_it_is_given() -> None:
    accepted: list[str] = []
    answer = sse(event(1), DONE).replace(b"\r\n\r\n", b"\r\nX-Request-Id: req-1\r\n\r\n", 1)
    with served(http(503), answer) as server, httpx.Client(headers={"x-whose": "ours"}) as client:
        path = "/v1/completions"
        assert len(list(resuming_stream([server.url], path, {}, accepted=accepted.append, http=client))) == 1
        assert not client.is_closed
    assert accepted == ["req-1"] and [ask["x-whose"] for ask in server.asked] == ["ours"] * 2


@given(st.lists(st.text(), max_size=5), st.integers(1, 9))
def test_events_are_whole_however_the_bytes_come(texts: list[str], size: int) -> None:
    data = [{"text": text.encode("utf-8", "replace").decode()} for text in texts]
    raw = b"retry: 1000\n" + b"".join(
        b"id: r:%d\ndata: " % at + json.dumps(item, ensure_ascii=False).encode() + b"\n\n"
        for at, item in enumerate(data)
    )
    raw += DONE
    parts = [raw[at : at + size] for at in range(0, len(raw), size)]
    expected = [StreamEvent(f"r:{at}", item) for at, item in enumerate(data)]
    assert list(read_events(parts)) == [*expected, None]
    whole = [found for found in read_events([raw[: -len(DONE) - 1]]) if found]
    assert whole == expected[:-1], "what is cut in its last byte is no event"
