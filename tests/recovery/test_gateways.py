"""Gateways die under streams; the next POST with its key finds a client's requests, or makes them as they were."""

import signal
from itertools import pairwise
from typing import Any, cast

import httpx

from blockrelay.protocol.encoding.request_ids import own_id
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_launcher.client.resuming import resuming_stream
from tests.support.gateway.sse_client import read_events
from tests.support.systems.system import Job, StartSystem, System, golden_tokens
from tests.support.waiting import wait_until

TOKENS = 100
BODY: dict[str, Any] = {
    "prompt": [1, 5, 9],
    "max_tokens": TOKENS,
    "temperature": 0.8,  # sampled: without the same seed these would be other tokens
    "ignore_eos": True,
    "return_token_ids": True,
}
PATH = "/v1/completions"
#: A gateway with this says one batch of tokens and no more, however long it lives.
SAYS_LITTLE = "gateway.before_event:delay=60@2"
#: However busy the machine is, one batch is not all of an answer.
SLOW = {"inject_speed": "0.05"}


def undisturbed(url: str, body: dict[str, Any], key: str) -> list[list[int]]:
    """Tokens of every choice, by a stream that nothing happens to; the request is then forgotten, its name is not."""
    answer = httpx.post(url + PATH, json=body, headers={"Idempotency-Key": key}, timeout=60).json()
    return [choice["token_ids"] for choice in answer["choices"]]


def forget(system: System) -> None:
    """As if the retention had passed."""
    for kind in ("request", "log", "followers"):
        for name in system.client.scan_iter(f"{{t}}:{kind}:*"):
            system.client.delete(name)


def test_several_streams_in_one_outlive_their_gateway(start_system: StartSystem) -> None:
    """Three prompts in one body: each event id resumes all of them, exactly."""
    system = start_system(stages=2, worker=SLOW)
    url, _ = system.start_gateway()
    body = {**BODY, "prompt": [[1, 5, 9], [7], [8, 9]]}
    golden = undisturbed(url, body, "k")
    forget(system)
    dying, victim = system.start_gateway(failpoint=SAYS_LITTLE)
    urls = [dying]
    got: list[list[int]] = [[], [], []]
    ids: list[str] = []
    cuts: list[str] = []
    for event in resuming_stream(urls, PATH, body, key="k", retrying=cuts.append):
        ids.append(event.id)
        (choice,) = event.data["choices"]
        got[choice["index"]] += choice["token_ids"]
        if len(ids) == 1:
            victim.kill()
            victim.wait()
            urls[:] = [url]
    assert got == golden and cuts
    assert len(ids) == len(set(ids)) == 3 * (TOKENS + 1), "every event once"
    steps = [[int(at) for at in name.partition(":")[2].split(".")] for name in ids]
    assert all(sum(after) == sum(before) + 1 for before, after in pairwise(steps))


def test_a_request_lost_by_redis_and_by_its_gateway_is_made_again_by_its_key(start_system: StartSystem) -> None:
    system = start_system(stages=1, worker=SLOW)
    healthy, _ = system.start_gateway()
    golden = undisturbed(healthy, BODY, "k")
    forget(system)
    size = system.control.aof_size()
    url, victim = system.start_gateway(failpoint=SAYS_LITTLE)
    urls, cuts, tokens = [url], list[str](), list[int]()
    for event in resuming_stream(urls, PATH, BODY, key="k", retrying=cuts.append):
        tokens += event.data["choices"][0]["token_ids"]
        if len(tokens) == 1:
            victim.kill()
            victim.wait()
            system.control.kill()
            system.control.truncate_aof(size)
            system.control.start()
            assert not system.client.keys("{t}:request:*"), "nobody knows the request any more"
            urls[:] = [healthy]
    assert [tokens] == golden and cuts


def test_a_request_lost_by_redis_is_accepted_again_by_whoever_follows_it(start_system: StartSystem) -> None:
    """Also by a gateway that did not accept it, and before the client asks."""
    system = start_system(stages=1)
    size = system.control.aof_size()
    url, first = system.start_gateway()
    system.workers[0].send_signal(signal.SIGSTOP)  # so that it is still waiting when it is lost
    params = SamplingParams(max_tokens=TOKENS, temperature=0.8, ignore_eos=True)
    answer = httpx.post(url + PATH, json={**BODY, "background": True, "timeout": 600}, timeout=60)
    name = own_id(answer.headers["x-request-id"])
    record = system.keys.request(name)
    before = cast(dict[bytes, bytes], system.client.hgetall(record))
    second, _ = system.start_gateway()
    with httpx.stream("GET", f"{second}/v1/requests/{name}/events", timeout=60) as stream:
        first.kill()
        first.wait()
        system.control.kill()
        system.control.truncate_aof(size)
        system.control.start()
        wait_until(lambda: system.client.exists(record), "it is accepted again", timeout_s=20)
        after = cast(dict[bytes, bytes], system.client.hgetall(record))
        assert {field: after[field] for field in (b"body", b"deadline_ms")} == {
            field: before[field] for field in (b"body", b"deadline_ms")
        }
        system.workers[0].send_signal(signal.SIGCONT)
        *_, (end, _) = pairwise(read_events(stream))
    (golden,) = golden_tokens(system.block_folder, [Job(request_id=name, prompt=(1, 5, 9), params=params)]).values()
    assert end.data["outputs"]["token_ids"] == golden


def test_a_signal_ends_a_gateway_at_the_moment_at_which_redis_answers_again(start_system: StartSystem) -> None:
    """It stood still while Redis came back, so that both reach it at once."""
    system = start_system(scheduler=False)
    for _ in range(3):
        url, gateway = system.start_gateway()
        system.control.kill()
        wait_until(lambda at=url: httpx.get(f"{at}/readyz").status_code == 503, "the gateway notices")
        gateway.send_signal(signal.SIGSTOP)
        system.control.start()
        gateway.send_signal(signal.SIGTERM)
        gateway.send_signal(signal.SIGCONT)
        assert gateway.wait(20) == 0
