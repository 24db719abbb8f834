"""Spans reach a trace server whole, and a trace server that is not there is nobody's trouble."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from blockrelay.errors import UsageError
from blockrelay.protocol.encoding.request_ids import own_id
from blockrelay.protocol.encoding.stage_span import StageSpan
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.tracing import ended_requests
from blockrelay_gateway.tracing.wanted import traces_wanted
from tests.support.gateway.played import PlayedWorker, RunningGateway, running_gateway
from tests.support.trace_receiver import TraceReceiver, attributes, trace_receiver
from tests.support.waiting import wait_until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[TraceReceiver]:
    with trace_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield receiver


def ask(gateway: RunningGateway, worker: PlayedWorker, *, sampled: str | None = None, steps: int | None = None) -> str:
    """Sends a background request, has it answered, and returns its id.

    `sampled` is the flag of the client's traceparent (None: it sends none); with `steps` the request is traced, and its
    stages record that many.
    """
    headers = {} if sampled is None else {"traceparent": f"00-{TRACE}-{PARENT}-{sampled}"}
    body = {"prompt": "Anna had a secret", "max_tokens": 2, "background": True, "model": "tiny"}
    body["trace"] = steps is not None
    answer = gateway.http.post("/v1/infer", json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    claimed = worker.claim()[0]
    worker.say(claimed, [7])
    tell(worker, claimed.request_id, steps or 0)
    worker.say(claimed, [8], end="length", meta={"route": ["w0", "w1"], "cached_tokens": 0})
    return own_id(answer.json()["request_id"])


def tell(worker: PlayedWorker, request_id: str, steps: int) -> None:
    """What stages would write, one step each 10 us."""
    began_us, name = 1000 * int(worker.record(request_id)[b"claimed_ms"]), worker.keys.trace(request_id)
    together = worker.client.pipeline(transaction=False)
    for number in range(steps):
        step = StageSpan(
            run=1, worker_id="w0", stage=0, first=1, last=1, number=number, kind="decode", position=number, rows=1,
            batch_rows=1, ready_us=began_us + 10 * number, waited_us=2, computed_us=5,
        )  # fmt: skip
        together.xadd(name, step.encode())  # pyright: ignore[reportArgumentType]
    together.expire(name, 60)
    together.execute()


def read_events_of(gateway: RunningGateway, request_id: str) -> None:
    """All events of a request that has ended."""
    answer = gateway.http.get(f"/v1/requests/{request_id}/events")
    assert answer.status_code == 200 and "[DONE]" in answer.text


def test_a_trace_server_gets_the_spans_of_a_request(
    receiver: TraceReceiver, settings: GatewaySettings, worker: PlayedWorker
) -> None:
    with running_gateway(settings.model_copy(update={"node_id": "gateway-of-the-test"})) as gateway:
        request_id = ask(gateway, worker, sampled="01")
        wait_until(lambda: len(receiver.spans) >= 5, "the spans have come")
    (whole,), (queue,), (run,) = receiver.named("text_completion"), receiver.named("queue"), receiver.named("run")
    assert (whole.trace_id.hex(), whole.parent_span_id.hex(), whole.kind) == (TRACE, PARENT, whole.SPAN_KIND_SERVER)
    assert {queue.parent_span_id, run.parent_span_id} == {whole.span_id}
    assert attributes(whole)["gen_ai.response.id"] == request_id
    assert attributes(run)["blockrelay.route"] == ["w0", "w1"]
    record = worker.record(request_id)
    assert whole.end_time_unix_nano == int(record[b"progress_ms"]) * 1_000_000
    said, _ = receiver.spans[0]
    assert (said["service.name"], said["service.instance.id"]) == ("blockrelay-gateway", "gateway-of-the-test")
    assert not [body for body in receiver.bodies if b"secret" in body], "prompts are in no trace"


def test_clients_and_the_usual_variables_say_what_is_sampled(
    receiver: TraceReceiver, settings: GatewaySettings, worker: PlayedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_gateway(settings) as gateway:
        ask(gateway, worker, sampled="00")
        kept = ask(gateway, worker)
        wait_until(lambda: receiver.named("text_completion"), "the one that nobody forbids has come")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    with running_gateway(settings) as gateway:
        ask(gateway, worker)
        asked = ask(gateway, worker, sampled="01")
        wait_until(lambda: len(receiver.named("text_completion")) == 2, "the one that its client samples has come")
    told = [attributes(span)["gen_ai.response.id"] for span in receiver.named("text_completion")]
    assert told == [kept, asked]
    assert receiver.spans[-1][0]["service.name"] == "ours"


def test_what_was_heard_is_sent_before_a_gateway_ends(
    receiver: TraceReceiver, settings: GatewaySettings, worker: PlayedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    with running_gateway(settings) as gateway:
        request_id = ask(gateway, worker)
        wait_until(lambda: request_id not in gateway.cell.registry, "the gateway has heard the end")
        assert not receiver.spans
    assert len(receiver.named("text_completion")) == 1


def test_stages_are_told_below_their_run_however_many(
    receiver: TraceReceiver, settings: GatewaySettings, worker: PlayedWorker
) -> None:
    with running_gateway(settings) as gateway:
        ask(gateway, worker, steps=3000)
        wait_until(lambda: len(receiver.named("stage")) == 3000, "all have come", timeout_s=30)
    (run,), (whole,) = receiver.named("run"), receiver.named("text_completion")
    assert {stage.parent_span_id for stage in receiver.named("stage")} == {run.span_id}
    assert {stage.trace_id for stage in receiver.named("stage")} == {run.trace_id}
    assert attributes(whole)["blockrelay.stage_steps"] == 3000
    first, *_ = receiver.named("stage")
    assert first.end_time_unix_nano - first.start_time_unix_nano == 5000
    assert attributes(first)["blockrelay.waited_seconds"] == 2e-6


def test_a_gateway_that_ends_tells_what_has_just_been_traced(
    receiver: TraceReceiver, settings: GatewaySettings, worker: PlayedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ended_requests, "STEPS_SETTLE_S", 3600)
    with running_gateway(settings) as gateway:
        request_id = ask(gateway, worker, steps=2)
        wait_until(lambda: request_id not in gateway.cell.registry, "the gateway has heard the end")
    assert (len(receiver.named("text_completion")), len(receiver.named("stage"))) == (1, 2)


def test_without_a_payload_redis_a_request_is_told_without_its_stages(
    receiver: TraceReceiver, settings: GatewaySettings, worker: PlayedWorker, tmp_path: Path
) -> None:
    away = settings.model_copy(update={"payload_redis_url": f"unix://{tmp_path}/nobody"})
    with running_gateway(away) as gateway:
        request_id = ask(gateway, worker, steps=2)
        wait_until(lambda: receiver.named("run"), "the gateway has told")
        assert gateway.http.get(f"/v1/requests/{request_id}/trace").status_code == 503
    assert not receiver.named("stage")


def test_a_trace_server_that_never_answers_holds_up_neither_requests_nor_the_end(
    settings: GatewaySettings, worker: PlayedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")  # longer than this test may take
        with running_gateway(settings) as gateway:
            for _ in range(3):
                ask(gateway, worker)


def test_a_gateway_that_reads_anothers_request_tells_only_when_that_one_is_gone(
    receiver: TraceReceiver, settings: GatewaySettings, worker: PlayedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ended_requests, "GATEWAY_TTL_S", 0)
    owners = worker.keys.gateway("*")
    with running_gateway(settings) as accepting:
        first, second = ask(accepting, worker), ask(accepting, worker)
        wait_until(lambda: len(receiver.named("text_completion")) == 2, "the one that accepted them has told")
        wait_until(lambda: worker.client.keys(owners), "it has said that it lives")
    with running_gateway(settings.model_copy(update={"node_id": "reading"})) as reading:
        read_events_of(reading, first)  # its owner's key is there for a while
        for living in worker.client.scan_iter(owners):
            worker.client.persist(living)
        own = ask(reading, worker)
        wait_until(lambda: len(receiver.named("text_completion")) == 3, "it has told of its own")
        for gone in worker.client.scan_iter(owners):
            worker.client.delete(gone)
        read_events_of(reading, second)
        wait_until(lambda: len(receiver.named("text_completion")) == 4, "it has told in the place of one that is gone")
    told = [
        attributes(span)["gen_ai.response.id"]
        for said, span in receiver.spans
        if said["service.instance.id"] == "reading" and span.kind == span.SPAN_KIND_SERVER
    ]
    assert told == [own, second]


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://collector/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_traces_are_sent_where_the_usual_variables_name_an_endpoint(
    variables: dict[str, str], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert traces_wanted() is wanted


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317", "is not a URL such as"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://", "is not a URL such as"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "only http/protobuf"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(
    name: str, value: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"^{name}: .*{complaint}"):
        traces_wanted()


def test_without_the_extra_a_gateway_says_what_to_install(settings: GatewaySettings) -> None:
    code = f"""
import sys
sys.modules["opentelemetry.sdk"] = None
from blockrelay_gateway.__main__ import main
sys.argv = ["gateway", "--model", {str(settings.model)!r}, "--port", "0"]
sys.exit(main())
"""
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "PATH": "/usr/bin"}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2, answer.stderr
    assert answer.stderr.count("\n") == 1
    assert "install '.[otel]'` in" in answer.stderr
