"""Choices of one prompt are what each would be alone, also when workers die in the middle of them."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from blockrelay_launcher.client.resuming import resuming_stream
from tests.support.systems.system import StartSystem, System
from tests.support.waiting import wait_until

TOKENS = 60
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": list(range(5, 105))},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Who has the ball? " * 8}]},
}
COMMON: dict[str, Any] = {
    "max_tokens": TOKENS,
    "temperature": 0.9,  # sampled: other seeds give other tokens
    "ignore_eos": True,
    "return_token_ids": True,
}
#: However busy the machine is, the first tokens are not all of an answer.
SLOW = {"inject_speed": "0.05"}


def body_of(path: str, **more: Any) -> dict[str, Any]:
    return {**COMMON, **PATHS[path], **more}


def alone(url: str, path: str, choice: dict[str, Any]) -> dict[str, Any]:
    """The answer to the same request with the seed of a choice and no other choice."""
    return httpx.post(url + path, json=body_of(path, seed=choice["seed"]), timeout=120).json()


def kill_when_tokens_come(system: System) -> None:
    """Kill a worker of each stage that computes choices, once some of their tokens are committed."""

    def busy() -> list[int]:
        records: list[Any] = [
            system.client.hmget(name, "committed", "route") for name in system.client.scan_iter("{t}:request:*")
        ]
        routes = [route.decode().split(",") for committed, route in records if route and int(committed or 0) >= 5]
        if len(routes) < 2:
            return []
        pids = {worker.id: worker.pid for worker in system.infos()}
        return [pids[name] for name in routes[0]]

    found: list[int] = []
    wait_until(lambda: bool(found.extend(busy()) or found), "choices have tokens")
    for pid in found:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("path", "streamed"), [("/v1/completions", False), ("/v1/chat/completions", True)])
def test_kill_9_changes_no_choice(start_system: StartSystem, path: str, streamed: bool) -> None:
    system = start_system(stages=2, replicas=2, worker=SLOW)
    url, _ = system.start_gateway()
    body = body_of(path, n=3, stream_options={"include_usage": True}) if streamed else body_of(path, n=3)

    def ask() -> tuple[list[list[int]], list[int], dict[str, Any]]:
        """The tokens and the seed of each choice, and the usage."""
        if not streamed:
            answer = httpx.post(url + path, json=body, timeout=120).json()
            choices = answer["choices"]
            return [one["token_ids"] for one in choices], [one["seed"] for one in choices], answer["usage"]
        tokens: list[list[int]] = [[], [], []]
        seeds, usage = [0, 0, 0], dict[str, Any]()
        for event in resuming_stream([url], path, body):
            usage = event.data["usage"] or usage
            for choice in event.data["choices"]:
                tokens[choice["index"]] += choice.get("token_ids", [])
                seeds[choice["index"]] = choice.get("seed", seeds[choice["index"]])
        return tokens, seeds, usage

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        kill_when_tokens_come(system)
        tokens, seeds, usage = asked.result()
    assert len(set(seeds)) == 3 and len(set(map(tuple, tokens))) == 3
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda seed: alone(url, path, {"seed": seed}), seeds))
    for got, answer in zip(tokens, answers, strict=True):
        assert answer["choices"][0]["token_ids"] == got
        assert answer["usage"]["prompt_tokens"] == usage["prompt_tokens"] < 200
    assert usage["completion_tokens"] == 3 * TOKENS


@pytest.mark.parametrize("stages", [1, 2])
def test_a_prompt_is_computed_once_for_all_its_choices(start_system: StartSystem, stages: int) -> None:
    system = start_system(stages=stages)
    url, _ = system.start_gateway()
    answer = httpx.post(url + "/v1/completions", json=body_of("/v1/completions", n=4, seed=5), timeout=60).json()
    assert answer["usage"]["prompt_tokens"] == 100
    computed = system.metric("blockrelay_worker_prompt_tokens_total")
    assert computed == 100 + 3 * 4, "what is behind the last full page has each choice for itself"
    for choice in answer["choices"]:
        assert alone(url, "/v1/completions", choice)["choices"][0]["token_ids"] == choice["token_ids"]
