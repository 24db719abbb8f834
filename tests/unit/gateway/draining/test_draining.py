"""What clients and load balancers see of a gateway that was told to end: nothing breaks that can end by itself."""

import json
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import websockets.sync.client as websockets
from websockets.exceptions import ConnectionClosedError

from blockrelay.settings import GatewaySettings
from blockrelay_gateway.draining.course import Phase
from blockrelay_gateway.http import server as http_server
from tests.support.gateway.played import EndingGateway, PlayedWorker, answering, ending_gateway, running_gateway
from tests.support.gateway.sockets import connected, to_its_end
from tests.support.gateway.sse_client import read_events
from tests.support.waiting import wait_until

PLAIN: dict[str, Any] = {"prompt": "x", "stream": True, "max_tokens": 3}
BODY = json.dumps(PLAIN)
LONG_S, NO_TIME_S = 600.0, 0.05


def lasting(settings: GatewaySettings, *, linger_s: float = 0.0, drain_s: float = LONG_S) -> GatewaySettings:
    return settings.model_copy(update={"gateway_linger_s": linger_s, "gateway_drain_s": drain_s})


def socket_to(gateway: EndingGateway) -> websockets.ClientConnection:
    return websockets.connect(gateway.url.replace("http", "ws") + "/v1/infer/ws")


def closed_by(connection: websockets.ClientConnection) -> tuple[int, str]:
    """Code and reason with which the gateway closes a socket."""
    with pytest.raises(ConnectionClosedError) as raised:
        connection.recv(timeout=30)
    assert raised.value.rcvd is not None
    return raised.value.rcvd.code, raised.value.rcvd.reason


def texts(response: httpx.Response) -> str:
    *events, done = read_events(response)
    assert done.data == "DONE"
    return "".join(event.data["choices"][0]["text"] for event in events)


def test_it_is_not_ready_at_once_and_serves_whoever_still_comes(
    settings: GatewaySettings, worker: PlayedWorker
) -> None:
    with ending_gateway(lasting(settings, linger_s=LONG_S)) as gateway, answering(worker, lambda _: ([5, 6], "stop")):
        before = gateway.post("/v1/completions", prompt="x")
        assert before.status_code == 200 and "connection" not in before.headers
        assert gateway.http.get("/readyz").status_code == 200
        gateway.tell(signal.SIGTERM)
        for path in ("/readyz", "/readyz?for=accepting"):
            answer = httpx.get(gateway.url + path)
            assert answer.status_code == 503 and "draining" in answer.json()["reasons"][0]
        assert httpx.get(f"{gateway.url}/health").status_code == 503
        assert httpx.get(f"{gateway.url}/livez").status_code == 200
        for path, more in (("/v1/completions", {}), ("/v1/infer", {}), ("/v1/completions", {"stream": True})):
            answer = httpx.post(gateway.url + path, json={"prompt": "x", **more})
            assert answer.status_code == 200 and answer.headers["connection"] == "close", answer.text
        assert "total_tokens" in before.text and not gateway.ended


def test_what_is_under_way_ends_by_itself_when_nobody_listens_any_more(
    settings: GatewaySettings, worker: PlayedWorker
) -> None:
    body = {"prompt": "x", "max_tokens": 3}
    with ending_gateway(lasting(settings)) as gateway, ThreadPoolExecutor() as pool:
        whole = pool.submit(httpx.post, f"{gateway.url}/v1/completions", json=body, timeout=30)
        (waiting,) = worker.claim()
        with gateway.http.stream("POST", "/v1/completions", json=PLAIN) as response:
            claimed = worker.take(worker.tokens[:1])
            events = read_events(response)
            assert "choices" in next(events).data
            gateway.tell(signal.SIGTERM)
            wait_until(lambda: not gateway.listens, "nobody listens")
            worker.say(claimed, worker.tokens[1:2])
            assert "choices" in next(events).data
            worker.say(claimed, worker.tokens[2:3], end="length")
            worker.say(waiting, worker.tokens[:3], end="length")
            *_, last, done = events
        assert last.data["choices"][0]["finish_reason"] == "length" and done.data == "DONE"
        assert whole.result().json()["usage"]["completion_tokens"] == 3
        assert whole.result().headers["connection"] == "close"
        wait_until(lambda: gateway.ended, "it ends, now that nothing is under way")
    assert gateway.gateway.drain.phase < Phase.GONE


@pytest.mark.parametrize("claims", [True, False], ids=["running", "queued"])
def test_what_is_not_done_in_time_is_told_where_it_goes_on(
    settings: GatewaySettings, worker: PlayedWorker, claims: bool
) -> None:
    """A plain stream, which knows no ids of events, is told where it goes on; the rest, read at any gateway, fits."""
    with running_gateway(settings) as other, ending_gateway(lasting(settings, drain_s=NO_TIME_S)) as gateway:
        with gateway.http.stream("POST", "/v1/completions", json=PLAIN) as response:
            events, seen = read_events(response), ""
            runs = worker.claim() if claims else []
            for run in runs:
                worker.say(run, worker.tokens[:1])
                seen = next(events).data["choices"][0]["text"]
            gateway.tell(signal.SIGTERM)
            error, done = list(events)
        assert done.data == "DONE" and error.data["error"]["code"] == "unavailable"
        _, _, rest = error.data["error"]["message"].rpartition(" ")
        assert rest.startswith("/v1/requests/cmpl-") and rest.endswith("?starting_after=1" if claims else "/events")
        wait_until(lambda: gateway.ended, "it ends")
        (run,) = runs or worker.claim()
        worker.say(run, worker.tokens[1:3] if claims else worker.tokens[:3], end="length")
        with other.http.stream("GET", rest) as response:
            seen += texts(response)
        again = other.http.get(rest.partition("/events")[0]).json()
        assert again["status"] == "completed" and again["text"] == seen != ""


def test_a_whole_answer_that_is_not_done_in_time_is_503_and_says_where_it_will_be(
    settings: GatewaySettings, worker: PlayedWorker
) -> None:
    with running_gateway(settings) as other, ending_gateway(lasting(settings, drain_s=NO_TIME_S)) as gateway:
        with ThreadPoolExecutor() as pool:
            asked = [
                pool.submit(httpx.post, gateway.url + path, json={"prompt": "x", "max_tokens": 1}, timeout=30)
                for path in ("/v1/completions", "/v1/infer")
            ]
            runs = worker.claim(2)
            gateway.tell(signal.SIGTERM)
            answers = [one.result() for one in asked]
        for run in runs:
            worker.say(run, worker.tokens[:1], end="length")
        for answer in answers:
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
            message = answer.json()["error"]["message"]
            path = message.rpartition(" ")[2]
            assert "shuts down" in message and other.http.get(path).json()["usage"]["completion_tokens"] == 1


def test_an_idle_socket_is_closed_at_once_and_may_try_again(settings: GatewaySettings, worker: PlayedWorker) -> None:
    with ending_gateway(lasting(settings, linger_s=LONG_S)) as gateway, socket_to(gateway) as idle:
        gateway.tell(signal.SIGTERM)
        code, reason = closed_by(idle)
        assert code == 1012 and "again" in reason
        with socket_to(gateway) as late, answering(worker, lambda _: ([5], "stop")):
            for name in ("a", "b"):  # who has no other gateway yet is served
                late.send(json.dumps({"id": name, "prompt": "x"}))
                assert json.loads(late.recv(timeout=30))["status"] == "success"
        assert gateway.listens and not gateway.ended


def test_a_busy_socket_is_closed_when_its_messages_are_answered(
    settings: GatewaySettings, worker: PlayedWorker
) -> None:
    with ending_gateway(lasting(settings)) as gateway, socket_to(gateway) as busy:
        for name in ("whole", "stream"):
            busy.send(json.dumps({"id": name, "prompt": "x", "max_tokens": 2, "stream": name == "stream"}))
        runs = worker.claim(2)
        gateway.tell(signal.SIGTERM)
        wait_until(lambda: not gateway.listens, "nobody listens")
        busy.send(json.dumps({"id": "late", "prompt": "x"}))
        for run in runs:
            worker.say(run, worker.tokens[:2], end="length")
        answers: list[Any] = []
        while sum(answer["status"] == "success" for answer in answers) < 2:
            answers.append(json.loads(busy.recv(timeout=30)))
        assert closed_by(busy)[0] == 1012
        assert {answer["id"] for answer in answers} == {"whole", "stream"}
        wait_until(lambda: gateway.ended, "it ends")
        assert not worker.client.zcard(worker.keys.running), "what came too late was not accepted"


def test_a_socket_that_is_busy_to_the_end_is_told_and_closed(settings: GatewaySettings, worker: PlayedWorker) -> None:
    with ending_gateway(lasting(settings, drain_s=NO_TIME_S)) as gateway, socket_to(gateway) as busy:
        busy.send(json.dumps({"id": "a", "prompt": "x"}))
        worker.claim()
        gateway.tell(signal.SIGTERM)
        answer = json.loads(busy.recv(timeout=30))
        assert answer["id"] == "a" and "/v1/requests/req-" in answer["message"]
        assert closed_by(busy)[0] == 1012
        wait_until(lambda: gateway.ended, "it ends")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("linger_s", [0.0, LONG_S])
def test_a_second_signal_waits_for_nothing(
    settings: GatewaySettings, worker: PlayedWorker, number: int, linger_s: float
) -> None:
    with (
        ending_gateway(lasting(settings, linger_s=linger_s)) as gateway,
        socket_to(gateway) as busy,
        gateway.http.stream("POST", "/v1/completions", json=PLAIN) as response,
    ):
        busy.send(json.dumps({"prompt": "x"}))
        worker.claim(2)
        gateway.tell(signal.SIGTERM)
        gateway.tell(number)
        error, _ = list(read_events(response))
        assert "shuts down" in error.data["error"]["message"]
        wait_until(lambda: gateway.ended, "it ends")


def test_ctrl_c_tells_readers_at_once(settings: GatewaySettings, worker: PlayedWorker) -> None:
    with (
        ending_gateway(lasting(settings, linger_s=LONG_S)) as gateway,
        gateway.http.stream("POST", "/v1/completions", json=PLAIN) as response,
    ):
        worker.claim()
        gateway.tell(signal.SIGINT)
        error, _ = list(read_events(response))
        assert "shuts down" in error.data["error"]["message"]
        wait_until(lambda: gateway.ended, "it ends")


def test_a_request_on_its_way_on_a_connection_that_is_kept_is_answered(
    settings: GatewaySettings, worker: PlayedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an answer was under way when the end began: its head did not say that it is the last one."""
    monkeypatch.setattr(http_server, "LAST_REQUEST_S", LONG_S)
    with (
        ending_gateway(lasting(settings)) as gateway,
        connected(gateway) as fresh,
        connected(gateway) as kept,
        connected(gateway) as streaming,
    ):
        kept.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
        first = b""
        while not first.endswith(b"}"):
            first += kept.recv(4096)
        assert first.startswith(b"HTTP/1.1 200") and b"connection: close" not in first
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(BODY)}\r\n\r\n"
        streaming.sendall((head + BODY).encode())
        (claimed,) = worker.claim()
        events = b""
        while b"\r\n\r\n" not in events:  # the head is sent a moment after the request is queued
            events += streaming.recv(4096)
        assert events.startswith(b"HTTP/1.1 200") and b"connection: close" not in events
        gateway.tell(signal.SIGTERM)
        wait_until(lambda: not gateway.listens, "nobody listens")
        worker.say(claimed, worker.tokens[:3], end="length")
        while not events.endswith(b"\r\n0\r\n\r\n"):
            events += streaming.recv(4096)
        for connection in (fresh, kept, streaming):
            connection.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
            answer = to_its_end(connection)
            assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer
        wait_until(lambda: gateway.ended, "it ends, now that no connection is left")


def test_connections_that_ask_for_nothing_and_endless_streams_do_not_hold_it_up(
    settings: GatewaySettings, worker: PlayedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "LAST_REQUEST_S", NO_TIME_S)
    with (
        ending_gateway(lasting(settings, linger_s=NO_TIME_S)) as gateway,
        connected(gateway) as idle,
        gateway.http.stream("GET", "/v1/status/events") as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("retry")
        gateway.tell(signal.SIGTERM)
        assert all(not line.startswith("data") for line in lines)
        assert to_its_end(idle) == b""
        wait_until(lambda: gateway.ended, "it ends")


def test_redis_that_goes_away_meanwhile_costs_a_pause(settings: GatewaySettings, worker: PlayedWorker) -> None:
    """Also where it answers again only behind the end of listening."""
    with (
        ending_gateway(lasting(settings)) as gateway,
        gateway.http.stream("POST", "/v1/completions", json=PLAIN) as response,
    ):
        (claimed,) = worker.claim()
        gateway.tell(signal.SIGTERM)
        worker.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        worker.say(claimed, worker.tokens[:3], end="length")
        assert texts(response)
        wait_until(lambda: gateway.ended, "it ends")


def test_a_head_that_begins_while_it_lingers_is_waited_for(settings: GatewaySettings, worker: PlayedWorker) -> None:
    with ending_gateway(lasting(settings, linger_s=LONG_S)) as gateway, socket.socket() as slow:
        gateway.tell(signal.SIGTERM)
        slow.connect(("127.0.0.1", gateway.http.base_url.port or 0))
        slow.sendall(b"GET /version HTTP/1.1\r\n")
        slow.sendall(b"host: localhost\r\n\r\n")
        assert to_its_end(slow).startswith(b"HTTP/1.1 200")
