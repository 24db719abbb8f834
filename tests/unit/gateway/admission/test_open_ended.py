"""Chats that name no limit go as far as there is room, and nobody is refused or waits for their sake."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest
import redis

from blockrelay.auth.api_keys import Tenant, add_key
from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.redis.client import Scripts
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.admission.admission_request import AdmissionRequest
from blockrelay_gateway.admission.open_ended import bounded
from blockrelay_gateway.policy import EXPECTED_TOKENS
from tests.support.gateway.played import PlayedWorker, RunningGateway, running_gateway

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
SHORT, AT_ONCE = 24, 16
SPLITS = {"1-2": (0,), "1-1,2-2": (0, 1), "1-1,2-2,3-3": (0, 1, 2)}


def asked(*, prompt: int = 20, room: int = 4000, open_ended: bool = True) -> AdmissionRequest:
    params = SamplingParams(max_tokens=room)
    body = RequestBody(prompt=np.zeros(prompt, dtype=np.int32), params=params.to_dict())
    return AdmissionRequest(request_id="req-1", body=body, params=params, open_ended=open_ended)


@pytest.mark.parametrize(
    ("room", "pages", "per_minute", "most"),
    [
        (4000, 100, None, 1580),  # the share of a pool
        (900, 100, None, 900),  # the context
        (4000, 100, 1000, 980),  # the key's budget
        (4000, 0, None, 128),  # no worker is known
        (4000, 2, None, 128),  # pools so small that it always was less than a share
        (50, 2, None, 50),
        (4000, 100, 60, 128),  # refused for its size by the limits, as ever
    ],
)
def test_its_limit_is_the_least_of_context_pool_and_budget(
    room: int, pages: int, per_minute: int | None, most: int
) -> None:
    found = bounded(asked(room=room), Tenant(name="ada", tokens_per_minute=per_minute), pages)
    assert found.params.max_tokens == most
    assert found.body.params["max_tokens"] == most
    assert found.tokens == 20 + min(128, room), "what it is charged is what it always was"


def test_a_limit_that_was_named_stays() -> None:
    request = asked(open_ended=False)
    assert bounded(request, Tenant(name="ada", tokens_per_minute=10), 1) is request


def chat(gateway: RunningGateway, key: str = "none", **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return gateway.http.post("/v1/chat/completions", json={**CHAT, **body}, headers=headers)


def played(folder: BlockFolder, client: redis.Redis, scripts: Scripts, keys: Keys, split: str) -> PlayedWorker:
    names = tuple(f"w{stage}" for stage in SPLITS[split])
    return PlayedWorker(client=client, scripts=scripts, keys=keys, model=folder.model_key, names=names, split=split)


def budget_left(client: redis.Redis, keys: Keys) -> float:
    level = cast(bytes | None, client.hget(keys.bucket("ada"), "level"))
    assert level is not None
    return float(level)


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("split", SPLITS)
def test_sixteen_short_chats_run_at_once(
    folder: BlockFolder,
    client: redis.Redis,
    scripts: Scripts,
    keys: Keys,
    settings: GatewaySettings,
    tmp_path: Path,
    split: str,
    limited: bool,
) -> None:
    """The pool has room for all of them as they always were, and not for as many with the whole context each."""
    stages, pages = SPLITS[split], AT_ONCE * folder.model.max_position // 16 - 1
    worker = played(folder, client, scripts, keys, split).register(stages=stages, pages=pages)
    worker.beat(stages)
    budget = AT_ONCE * (SHORT + EXPECTED_TOKENS)
    tenant = Tenant(name="ada", tokens_per_minute=budget, concurrency=AT_ONCE) if limited else Tenant(name="ada")
    key = add_key(tmp_path / "keys.json", tenant)
    with (
        running_gateway(settings.model_copy(update={"api_keys": tmp_path / "keys.json"})) as gateway,
        ThreadPoolExecutor(AT_ONCE) as threads,
    ):
        answers = [threads.submit(chat, gateway, key) for _ in range(AT_ONCE)]
        claims = worker.claim(AT_ONCE, stages)
        assert all(claimed.body.prompt.size <= SHORT for claimed in claims)
        assert all(int(claimed.body.params["max_tokens"]) >= EXPECTED_TOKENS for claimed in claims)
        for claimed in claims:
            worker.say(claimed, [5], end="stop")
        assert [answer.result().status_code for answer in answers] == [200] * AT_ONCE


def test_a_chat_is_charged_at_its_end_for_what_was_not_expected(
    folder: BlockFolder,
    client: redis.Redis,
    worker: PlayedWorker,
    keys: Keys,
    settings: GatewaySettings,
    tmp_path: Path,
) -> None:
    budget, new = 500, 200
    key = add_key(tmp_path / "keys.json", Tenant(name="ada", tokens_per_minute=budget))
    with (
        running_gateway(settings.model_copy(update={"api_keys": tmp_path / "keys.json"})) as gateway,
        ThreadPoolExecutor(1) as threads,
    ):
        answer = threads.submit(chat, gateway, key)
        (claimed,) = worker.claim()
        prompt = int(claimed.body.prompt.size)
        room = min(folder.model.max_position, budget, 1000 // 64 * 16) - prompt
        assert claimed.body.params["max_tokens"] == room > new
        level = budget_left(client, keys)
        assert level == budget - prompt - EXPECTED_TOKENS
        worker.say(claimed, [5] * new, end="stop")
        assert answer.result().json()["usage"]["completion_tokens"] == new
        assert budget_left(client, keys) == level - (new - EXPECTED_TOKENS)


def test_completions_and_a_settled_default_are_as_they_were(gateway: RunningGateway, worker: PlayedWorker) -> None:
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(gateway.post, "/v1/completions", prompt="hi")
        (claimed,) = worker.claim()
        assert claimed.body.params["max_tokens"] == EXPECTED_TOKENS
        worker.say(claimed, [5], end="stop")
        assert answer.result().status_code == 200
