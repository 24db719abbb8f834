"""Quotas, priorities and deadlines as a client meets them: statuses, Retry-After, and the order of claims."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from blockrelay.auth.api_keys import Tenant, add_key
from blockrelay.protocol.capabilities import Pace
from blockrelay.protocol.transitions import calls
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.http.errors import retry_after_s
from blockrelay_gateway.policy import RETRY_AFTER_MAX_S, RETRY_AFTER_SPREAD
from tests.support.gateway.played import PlayedWorker, RunningGateway, answering, running_gateway
from tests.support.scraping import sampled
from tests.support.waiting import wait_until


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def keys_of(file: Path) -> dict[str, str]:
    tenants = [
        Tenant(name="frugal", tokens_per_minute=60),
        Tenant(name="narrow", concurrency=1),
        Tenant(name="later", priority=5),
        Tenant(name="free"),
        Tenant(name="first", priority=-5),
        Tenant(name="chief", operator=True),
    ]
    return {tenant.name: add_key(file, tenant) for tenant in tenants}


@pytest.fixture
def settings(settings: GatewaySettings, file: Path, keys_of: dict[str, str]) -> GatewaySettings:
    return settings.model_copy(update={"api_keys": file})


@pytest.fixture
def ask(gateway: RunningGateway, keys_of: dict[str, str]):
    def send(tenant: str, **body: Any) -> httpx.Response:
        content = {"prompt": [3] * 10, "max_tokens": 20, "background": True, **body}
        headers = {"authorization": f"Bearer {keys_of[tenant]}"}
        return gateway.http.post("/v1/completions", content=json.dumps(content), headers=headers)

    return send


def refused_by(gateway: RunningGateway, limit: str) -> float:
    return gateway.metric("blockrelay_admission_limited_total", limit=limit)


def test_what_each_key_used_is_told_to_that_key_and_to_operators(
    gateway: RunningGateway, worker: PlayedWorker, ask: Any, keys_of: dict[str, str]
) -> None:
    def told(reader: str) -> str:
        headers = {"authorization": f"Bearer {keys_of[reader]}"}
        return gateway.http.get("/metrics/tenants", headers=headers).text

    assert [ask("frugal").status_code for _ in range(3)] == [202, 202, 429]
    (claimed,) = worker.claim()  # before others have a share of the worker
    worker.say(claimed, [5, 6], end="length")
    assert ask("free").status_code == 202
    everything = lambda: told("chief")  # noqa: E731
    wait_until(lambda: sampled(everything(), "blockrelay_tenant_generation_tokens_total") == 2, "two tokens")
    of = {"tenant": "frugal", "cell": "t", "model": "tiny"}
    assert sampled(everything(), "blockrelay_tenant_accepted_requests_total", **of) == 2
    assert sampled(everything(), "blockrelay_tenant_prompt_tokens_total", **of) == 20
    assert sampled(everything(), "blockrelay_tenant_limited_total", limit="tokens_per_minute", **of) == 1
    assert sampled(everything(), "blockrelay_tenant_generation_tokens_total", **of) == 2
    assert sampled(everything(), "blockrelay_tenant_time_to_first_token_seconds_count", **of) == 1
    assert 'tenant="narrow"' in everything(), "its series begin before its first request"
    assert told("free") and "frugal" not in told("free")
    assert gateway.http.get("/metrics/tenants").status_code == 401
    assert "tenant" not in gateway.http.get("/metrics").text, "which needs no key"


def test_tokens_per_minute(gateway: RunningGateway, worker: PlayedWorker, ask: Any) -> None:
    assert [ask("frugal").status_code for _ in range(2)] == [202, 202]
    refused = ask("frugal")
    assert refused.status_code == 429 and 29 <= int(refused.headers["retry-after"]) <= 31 * RETRY_AFTER_SPREAD
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert refused_by(gateway, "tokens_per_minute") == 1
    assert ask("free").status_code == 202


def test_what_a_quota_never_allows_is_a_bad_request(ask: Any, worker: PlayedWorker) -> None:
    refused = ask("frugal", max_tokens=51)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"


def accepted(worker: PlayedWorker) -> int:
    return int(worker.client.hget(worker.keys.totals(worker.model), "accepted") or 0)  # pyright: ignore[reportArgumentType]


def test_several_prompts_are_checked_together(gateway: RunningGateway, worker: PlayedWorker, ask: Any) -> None:
    def several(tenant: str, count: int, **body: Any) -> httpx.Response:
        return ask(tenant, prompt=[[3] * 10] * count, background=False, **body)

    assert ask("frugal").status_code == 202
    for _ in range(3):
        refused = several("frugal", 2, max_tokens=10)
        assert refused.status_code == 429, "30 are left, 40 are asked for"
        assert 9 <= int(refused.headers["retry-after"]) <= 11 * RETRY_AFTER_SPREAD, "when all of them fit"
    assert accepted(worker) == 1 and refused_by(gateway, "tokens_per_minute") == 3
    assert ask("frugal").status_code == 202, "they cost nothing"

    assert ask("narrow").status_code == 202
    for tenant, count, tokens, words in (
        ("frugal", 3, 20, "3 prompts and their max_tokens are 90 tokens; this key may use 60 per minute: send fewer"),
        ("narrow", 2, 2, "2 prompts count as requests of their own; this key may have 1 under way: send at most 1"),
    ):
        never = several(tenant, count, max_tokens=tokens)
        assert never.status_code == 400 and never.json()["error"]["param"] == "prompt"
        assert words in never.json()["error"]["message"]
    assert accepted(worker) == 3


def test_choices_of_a_prompt_are_checked_together(worker: PlayedWorker, ask: Any) -> None:
    for tenant, n, words in (
        ("frugal", 3, "3 choices, each with its prompt, and their max_tokens are 90 tokens; this key may use 60"),
        ("narrow", 2, "2 choices count as requests of their own; this key may have 1 under way: send at most 1"),
    ):
        never = ask(tenant, prompt=[3] * 10, n=n, max_tokens=20, background=False)
        assert never.status_code == 400 and never.json()["error"]["param"] == "n"
        assert words in never.json()["error"]["message"]
    assert accepted(worker) == 0


def test_several_prompts_that_fit_are_charged_once(worker: PlayedWorker, ask: Any) -> None:
    with answering(worker, lambda _: ([5] * 20, "length")):
        answer = ask("frugal", prompt=[[3] * 10] * 2, max_tokens=20, background=False)
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 2
    level, _ = worker.client.hmget(worker.keys.bucket("frugal"), "level", "at")
    assert 0 <= float(level or 60) < 5, "60 of 60, and what came back since"


def test_requests_under_way(gateway: RunningGateway, worker: PlayedWorker, ask: Any) -> None:
    assert ask("narrow").status_code == 202
    refused = ask("narrow")
    assert refused.status_code == 429 and refused_by(gateway, "concurrency") == 1
    worker.take([5], end="stop")
    assert ask("narrow").status_code == 202


def test_a_key_made_without_options_leaves_room_for_others(
    settings: GatewaySettings, worker: PlayedWorker, file: Path, keys_of: dict[str, str]
) -> None:
    wide = add_key(file, Tenant(name="wide", concurrency=8))
    with running_gateway(settings.model_copy(update={"max_in_flight": 8})) as gateway:

        def status(key: str, prompts: int = 1) -> int:
            prompt = [[3] * 10] * prompts if prompts > 1 else [3] * 10
            body = {"prompt": prompt, "max_tokens": 20, "background": prompts == 1}
            headers = {"authorization": f"Bearer {key}"}
            return gateway.http.post("/v1/completions", content=json.dumps(body), headers=headers).status_code

        assert status(keys_of["free"], prompts=5) == 400, "more than it may ever have"
        assert [status(keys_of["free"]) for _ in range(5)] == [202, 202, 202, 202, 429]
        assert refused_by(gateway, "in_flight") == 1
        assert [status(keys_of["first"]) for _ in range(3)] == [202, 202, 429], "half of what is left"
        assert [status(wide) for _ in range(3)] == [202, 202, 503], "it was given more"


def test_a_key_for_later_comes_later(worker: PlayedWorker, ask: Any) -> None:
    for name, priority in (("later", None), ("free", 7), ("free", None), ("first", -3), ("later", 5)):
        assert ask(name, prompt=[9], **({} if priority is None else {"priority": priority})).status_code == 202
    order = [worker.record(claimed.request_id)[b"tenant"].decode() for claimed in worker.claim(5)]
    assert order == ["first", "free", "later", "later", "free"]
    for name, priority in (("later", 4), ("first", -6), ("first", -101), ("free", 101)):
        refused = ask(name, priority=priority)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"


def test_a_key_made_without_options_overtakes_nobody(worker: PlayedWorker, ask: Any) -> None:
    refused = ask("free", priority=-1)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"
    said = refused.json()["error"]["message"]
    assert "send 0 or more" in said and "--priority -1" in said, "the remedy"
    assert [ask("free", priority=priority).status_code for priority in (0, 1)] == [202, 202]


def test_a_timeout_that_cannot_be_kept_is_refused_at_once(
    gateway: RunningGateway, worker: PlayedWorker, ask: Any
) -> None:
    worker.scripts.run(calls.heartbeat(worker.names[0], Pace(row_s=0.1, steps={1: 1.0})))
    late = ask("free", timeout=5)
    assert late.status_code == 503 and int(late.headers["retry-after"]) >= 1
    assert "timeout" in late.json()["error"]["message"] and refused_by(gateway, "deadline") == 1
    assert ask("free", timeout=60).status_code == 202


def test_a_wait_that_is_too_long_is_refused_unless_in_the_background(
    gateway: RunningGateway, worker: PlayedWorker, ask: Any
) -> None:
    worker.scripts.run(calls.heartbeat(worker.names[0], Pace(row_s=1.0, steps={1: 1.0})))
    assert ask("free", prompt=[3] * 400).status_code == 202
    late = ask("free", prompt=[3] * 400, background=False)
    assert late.status_code == 503 and refused_by(gateway, "wait") == 1


def test_retry_after_is_whole_seconds_with_jitter() -> None:
    assert {retry_after_s(0) for _ in range(100)} <= {1, 2}
    assert {retry_after_s(20_000) for _ in range(300)} <= set(range(20, 31))
    assert len({retry_after_s(20_000) for _ in range(300)}) > 3
    assert max(retry_after_s(10**9) for _ in range(100)) <= RETRY_AFTER_MAX_S * RETRY_AFTER_SPREAD
