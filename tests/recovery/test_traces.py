"""A trace shows what happened, also to processes that can no longer tell."""

import os
import signal
from typing import Any

import pytest

from blockrelay.protocol.encoding.request_ids import own_id
from blockrelay_launcher.client.resuming import resuming_stream
from tests.support.systems.system import StartSystem, System
from tests.support.trace_receiver import TraceReceiver, attributes, trace_receiver
from tests.support.waiting import wait_until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY: dict[str, Any] = {"prompt": [1, 5, 9], "max_tokens": 150, "ignore_eos": True, "return_token_ids": True}
PATH = "/v1/completions"


def ids_of(receiver: TraceReceiver, gateway: str) -> dict[tuple[str, str], int]:
    """(name, id) of each span that this gateway has sent, and how often."""
    told: dict[tuple[str, str], int] = {}
    with receiver.lock:
        for said, span in receiver.spans:
            if said["service.instance.id"] == gateway:
                name = (span.name, span.span_id.hex())
                told[name] = told.get(name, 0) + 1
    return told


def kill_who_runs(system: System, request: str) -> None:
    """SIGKILL to the worker of the last stage that has the request."""
    record: Any = system.client.hgetall(system.keys.request(request))
    last = record[b"route"].decode().split(",")[-1]
    (pid,) = [worker.pid for worker in system.infos() if worker.id == last]
    os.kill(pid, signal.SIGKILL)


def test_a_killed_worker_and_then_a_killed_gateway_are_no_hole_in_the_trace(
    start_system: StartSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ""
    with trace_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        system = start_system(stages=2, replicas=2, worker={"inject_speed": "0.5"})
        dying, victim = system.start_gateway(node_id="dying")
        healthy, _ = system.start_gateway(node_id="healthy")
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        urls, died = [dying], False
        for event in resuming_stream(urls, PATH, BODY, key="k", headers=headers):
            if not died and event.data["choices"][0]["token_ids"]:
                died, request = True, own_id(event.id.partition(":")[0])
                kill_who_runs(system, request)
        wait_until(lambda: receiver.named("text_completion"), "the gateway that accepted it has told")
        record: Any = system.client.hgetall(system.keys.request(request))

        (whole,) = receiver.named("text_completion")
        assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, PARENT)
        reruns = int(record[b"reruns"])
        assert attributes(whole)["blockrelay.runs"] == 1 + reruns >= 2
        assert whole.end_time_unix_nano == int(record[b"progress_ms"]) * 1_000_000
        runs = receiver.named("run")
        assert len(runs) == len(receiver.named("queue")) == 1 + reruns
        first, second, *_ = runs
        assert (attributes(first)["error.type"], attributes(first)["blockrelay.rerun.reason"]) == ("death", "death")
        assert [link.span_id for link in second.links] == [first.span_id]
        assert first.end_time_unix_nano <= second.start_time_unix_nano

        # Another gateway reads the same request; then the one that accepted it is gone, and it tells the same.
        again = list(resuming_stream([healthy], PATH, BODY, key="k", headers=headers))
        assert again
        victim.kill()
        victim.wait()
        told = ids_of(receiver, "dying")
        wait_until(lambda: ids_of(receiver, "healthy"), "the other gateway has told", timeout_s=60)
        assert ids_of(receiver, "healthy") == told
        assert set(told.values()) == {1}
