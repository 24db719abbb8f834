"""A trace shows what happened, also to processes that can no longer tell."""

import os
import signal
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, get_args

import httpx
import pytest

from blockrelay.protocol.encoding.request_ids import own_id
from blockrelay.protocol.encoding.stage_span import StageSpan
from blockrelay_gateway.tracing.stages import Doing
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


def kill_who_runs(system: System, request_id: str) -> None:
    """SIGKILL to the worker of the last stage that has the request."""
    record: Any = system.client.hgetall(system.keys.request(request_id))
    last = record[b"route"].decode().split(",")[-1]
    (pid,) = [worker.pid for worker in system.infos() if worker.id == last]
    os.kill(pid, signal.SIGKILL)


def test_a_killed_worker_and_then_a_killed_gateway_are_no_hole_in_the_trace(
    start_system: StartSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_id = ""
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
                died, request_id = True, own_id(event.id.partition(":")[0])
                kill_who_runs(system, request_id)
        wait_until(lambda: receiver.named("text_completion"), "the gateway that accepted it has told")
        record: Any = system.client.hgetall(system.keys.request(request_id))

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


def steps_of(system: System, request_id: str) -> list[StageSpan]:
    """What stages have told of it, as it lies on the payload Redis."""
    with system.payload.client() as payload:
        entries: Any = payload.xrange(system.keys.trace(request_id))
    return [StageSpan.decode(fields) for _, fields in entries]


def told_enough(system: System, request_id: str) -> bool:
    return len(steps_of(system, request_id)) > 30


def told_of(receiver: TraceReceiver, request_id: str) -> dict[str, list[Any]]:
    """Name -> spans, by their beginning, once the gateway has told of the request."""
    whole: list[Any] = []

    def found() -> bool:
        whole[:] = [s for s in receiver.named("text_completion") if attributes(s)["gen_ai.response.id"] == request_id]
        return bool(whole)

    wait_until(found, "the gateway has told")
    told = {name: [s for s in receiver.named(name) if s.trace_id == whole[0].trace_id] for name in ("queue", "run")}
    steps = attributes(whole[0])["blockrelay.stage_steps"]

    def stages() -> list[Any]:
        return [s for s in receiver.named("stage") if s.trace_id == whole[0].trace_id]

    wait_until(lambda: len(stages()) == steps, "all of its stages have come")
    return {**told, "whole": whole, "stage": stages()}


def seconds(span: Any) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def test_a_traced_request_says_what_every_stage_did_also_one_that_was_killed(
    start_system: StartSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trace_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        system = start_system(stages=3, worker={"speculation": "off", "inject_speed": "0.5"})
        system.start_worker(speculation="off", inject_speed="0.5")  # one to spare
        url, _ = system.start_gateway()
        system.wait_ready(4)
        body, tokens, request_id, died = {**BODY, "trace": True}, 0, "", False
        for event in resuming_stream([url], PATH, body, key="k"):
            request_id = own_id(event.id.partition(":")[0])
            tokens += len(event.data["choices"][0]["token_ids"])
            if tokens > 20 and not died:
                died = True
                wait_until(partial(told_enough, system, request_id), "its stages have told of it")
                kill_who_runs(system, request_id)
        assert tokens == 150
        told = told_of(receiver, request_id)
        record: Any = system.client.hgetall(system.keys.request(request_id))
        file = httpx.get(f"{url}/v1/requests/{request_id}/trace").json()
        steps = steps_of(system, request_id)

    # The request: its queue and runs are its time, to the millisecond.
    (whole,), runs = told["whole"], told["run"]
    assert len(runs) == 1 + int(record[b"reruns"]) >= 2
    assert sum(s.end_time_unix_nano - s.start_time_unix_nano for s in (*told["queue"], *runs)) == (
        whole.end_time_unix_nano - whole.start_time_unix_nano
    )

    # Every stage of both runs has told; what the worker that was killed had written is there.
    by_run = {number: [step for step in steps if step.run == number] for number in (1, len(runs))}
    for some in by_run.values():
        assert {step.stage for step in some} == {0, 1, 2}
    first, last = by_run[1], by_run[len(runs)]
    assert {step.worker_id for step in first} & {step.worker_id for step in last} != {step.worker_id for step in first}
    assert {step.kind for step in last} == {"prefill", "decode"}
    for stage in range(3):
        own = sorted((step for step in last if step.stage == stage), key=lambda step: step.number)
        assert [step.number for step in own] == list(range(len(own)))
        ends = [step.position + step.rows for step in own]
        assert [step.position for step in own[1:]] == ends[:-1], "no row was left out"
        assert ends[-1] == len(BODY["prompt"]) + 150 - 1
        assert all(before.ended_us <= after.began_us for before, after in pairwise(own)), "one step at a time"
        assert all(step.batch_rows == step.rows for step in own), "nobody else was there"

    # In the last run, which nobody disturbed, one step follows the other, from its beginning to its end. (A worker that
    # is interrupted when it has sent rows looks at its clock later than the next one has them.)
    (run,) = [run for run in runs if run.span_id == runs[-1].span_id]
    chain = sorted(last, key=lambda step: (step.position, step.stage))
    assert all(before.began_us <= after.ready_us for before, after in pairwise(chain)), "rows are computed, then sent"
    began, ended = run.start_time_unix_nano // 1000, run.end_time_unix_nano // 1000
    assert began <= chain[0].ready_us and chain[-1].began_us < ended + 1000, "a run's end is a whole millisecond"
    spent = [attributes(run)[f"blockrelay.{doing}_seconds"] for doing in get_args(Doing)]
    assert sum(spent) == pytest.approx(seconds(run))
    assert spent[0] == pytest.approx(covered_us(chain, began, ended) / 1e6)

    # The trace server and the file say the same.
    parents = {run.span_id: number for number, run in enumerate(runs, 1)}
    assert {(parents[s.parent_span_id], attributes(s)["blockrelay.run"]) for s in told["stage"]} >= {
        (1, 1), (len(runs), len(runs))
    }  # fmt: skip
    assert len(told["stage"]) == len(steps) == attributes(whole)["blockrelay.stage_steps"]
    slices = [event for event in file["traceEvents"] if event["ph"] == "X"]
    assert sum(event["name"] in ("queue", *(f"run {n}" for n in parents.values())) for event in slices) == 2 * len(runs)
    assert sorted(event["ts"] for event in slices if event["pid"] == 2) == sorted(step.began_us for step in steps)


def covered_us(steps: Sequence[StageSpan], began: int, ended: int) -> int:
    """How long some step computed. They overlap where a worker was interrupted when it had sent its rows."""
    covered, reached = 0, began
    for step in sorted(steps, key=lambda step: step.began_us):
        start, end = max(step.began_us, reached), min(step.ended_us, ended)
        covered, reached = covered + max(0, end - start), max(reached, end)
    return covered


def test_a_request_that_does_not_ask_writes_nothing(start_system: StartSystem) -> None:
    system = start_system(stages=2)
    url, _ = system.start_gateway()
    body = {"prompt": [1, 5, 9], "max_tokens": 20, "ignore_eos": True}
    plain = httpx.post(f"{url}{PATH}", json=body)
    asked = httpx.post(f"{url}{PATH}", json=body, headers={"Blockrelay-Trace": "true"})
    assert plain.json()["choices"][0]["text"] == asked.json()["choices"][0]["text"]
    answer = httpx.get(f"{url}/v1/requests/{asked.json()['id']}/trace")
    assert {event["pid"] for event in answer.json()["traceEvents"] if event["ph"] == "X"} == {1, 2}
    refused = httpx.get(f"{url}/v1/requests/{plain.json()['id']}/trace")
    assert refused.status_code == 404 and "trace: true" in refused.json()["error"]["message"]
    with system.payload.client() as payload:
        names: Any = payload.keys(system.keys.trace("*"))
        assert names == [system.keys.trace(own_id(asked.json()["id"])).encode()]
        assert 0 < payload.ttl(names[0]) <= 900  # pyright: ignore[reportOperatorIssue]
    with system.client as control:
        assert control.keys(system.keys.trace("*")) == []
