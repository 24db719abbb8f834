"""Tensor steps of several rows: as many requests, one answer, all accepted or none."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from blockrelay.auth.api_keys import Tenant, add_key
from blockrelay.protocol.messages import Claimed
from blockrelay.protocol.tensors import decode_tensor
from blockrelay.protocol.transitions import calls
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.admission import accept as admission
from tests.support.gateway.played import PlayedWorker, RunningGateway, running_gateway
from tests.support.redis.redis_answers import LINES
from tests.support.redis.redis_proxy import RedisProxy, proxied
from tests.support.redis.redis_server import RedisServer
from tests.support.waiting import wait_until

VOCAB = 512


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def batch(*rows: list[int], step: int = 1, session: str = "chat", **more: Any) -> dict[str, Any]:
    """`rows`, padded at their beginning to the longest."""
    width = max(map(len, rows))
    ids = [[0] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {
        "session_id": session,
        "step": step,
        "input_tensors": {"input_ids": ids, "attention_mask": mask},
        **more,
    }


def logits_of(claimed: Claimed) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """Logits that tell which tokens they are of."""
    count = claimed.body.prompt.size - claimed.body.prior if claimed.body.logits == "all" else 1
    values = np.zeros((count, VOCAB), dtype=np.float32)
    values[:, 0] = claimed.body.prompt[-count:]
    return values


def ask(url: str, pool: ThreadPoolExecutor, body: dict[str, Any], **headers: str) -> "Future[httpx.Response]":
    return pool.submit(lambda: httpx.post(f"{url}/v1/infer", json=body, headers=headers, timeout=30))


def run(
    gateway: RunningGateway,
    worker: PlayedWorker,
    pool: ThreadPoolExecutor,
    body: dict[str, Any],
    rows: int,
    **headers: str,
) -> Any:
    """First columns of the answer's logits."""
    waiting = ask(gateway.url, pool, body, **headers)
    for claimed in worker.claim(rows):
        worker.finish_tensor(claimed, logits_of(claimed))
    return first_column(waiting.result())


def first_column(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    answer = response.json()
    values = decode_tensor(answer["outputs"]["logits"], param="logits", max_elements=1 << 20)
    assert values.shape[2] == VOCAB and values.dtype == np.float16
    return values[:, :, 0].tolist()


def tokens_of(worker: PlayedWorker, session: str) -> list[int]:
    raw = worker.client.hget(worker.keys.session(session), "tokens") or b""
    return np.frombuffer(raw, dtype="<u4").tolist()  # pyright: ignore


def test_rows_are_requests_of_the_session_and_answered_as_one(
    gateway: RunningGateway, worker: PlayedWorker, pool: ThreadPoolExecutor
) -> None:
    assert run(gateway, worker, pool, batch([5], [6, 7, 8]), 2) == [[5], [8]]
    assert run(gateway, worker, pool, batch([9, 10], [11], step=2, logits="all"), 2) == [[9, 10], [0, 11]]
    assert [tokens_of(worker, f"chat#{row}") for row in (0, 1)] == [[5, 9, 10], [6, 7, 8, 11]]
    everywhere = batch([0, 0, 1, 2], [0, 3, 4, 5], session="left", logits="all")
    everywhere["input_tensors"]["attention_mask"] = [[0, 0, 1, 1], [0, 1, 1, 1]]
    assert run(gateway, worker, pool, everywhere, 2) == [[0, 1, 2], [3, 4, 5]], (
        "what is padding in all rows is left out"
    )


def test_the_same_step_again_computes_nothing_and_only_what_failed_runs_again(
    gateway: RunningGateway, worker: PlayedWorker, pool: ThreadPoolExecutor
) -> None:
    body = batch([5], [6])
    waiting = ask(gateway.url, pool, body)
    first, second = sorted(worker.claim(2), key=lambda claimed: claimed.body.session)
    worker.finish_tensor(first, logits_of(first))
    worker.say(second, [], end="error", meta={"error": "GPU memory exhausted", "failed_block": "block_2"})
    failed = waiting.result()
    assert failed.status_code == 500 and failed.json()["failed_block"] == "block_2"
    assert run(gateway, worker, pool, body, 1) == [[5], [6]]
    assert first_column(ask(gateway.url, pool, body).result()) == [[5], [6]]
    worker.client.delete(worker.keys.result(first.request_id))
    assert run(gateway, worker, pool, body, 1) == [[5], [6]], "a result that is gone is computed once more"
    assert worker.client.zcard(worker.keys.running) == 0


def test_what_an_ended_gateway_has_begun_the_next_one_completes(
    gateway: RunningGateway, worker: PlayedWorker, pool: ThreadPoolExecutor
) -> None:
    """Between two ACCEPTs of a step: some rows are there, the others are not."""
    body = batch([5], [6])
    run(gateway, worker, pool, body, 2)
    worker.client.delete(worker.keys.session("chat#1"))
    assert run(gateway, worker, pool, body, 1) == [[5], [6]]
    assert run(gateway, worker, pool, batch([7], [8], step=2), 2) == [[7], [8]]


#: In the ACCEPT of the second row, and in no other command: the session's name as a string of the arguments' map.
SECOND_ROW = b"\xa6chat#1"
WAYS: dict[str, Callable[[RedisProxy], None]] = {
    "is away": lambda proxy: proxy.cut_at(SECOND_ROW, runs=False),
    "is away, and its last reply": lambda proxy: proxy.cut_at(SECOND_ROW, runs=True),
    "refuses": lambda proxy: proxy.answer_at(SECOND_ROW, LINES["NOPERM"]),
    "is full": lambda proxy: proxy.answer_at(SECOND_ROW, LINES["OOM"]),
}


@pytest.mark.parametrize("how", WAYS)
def test_a_step_between_whose_rows_redis_goes_leaves_nothing_and_runs_when_sent_again(
    settings: GatewaySettings,
    redis_server: RedisServer,
    worker: PlayedWorker,
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    monkeypatch.setattr(admission, "ACCEPT_RETRY_S", 0.1)
    with (
        proxied(redis_server) as proxy,
        running_gateway(settings.model_copy(update={"redis_url": proxy.url})) as gateway,
    ):
        run(gateway, worker, pool, batch([5], [6]), 2)
        body = batch([7], [8], step=2)
        WAYS[how](proxy)
        refused = ask(gateway.url, pool, body).result()
        assert refused.status_code == 503, refused.text
        assert worker.client.zcard(worker.keys.running) > 0, "the first row is there, and nobody can take it back"
        proxy.heal()
        wait_until(lambda: worker.client.zcard(worker.keys.running) == 0, "what was accepted of it is taken back")
        assert not worker.scripts.run(calls.claim(worker.names[0], 8, free_pages=1000))
        assert run(gateway, worker, pool, body, 2) == [[7], [8]]
        assert [tokens_of(worker, f"chat#{row}") for row in (0, 1)] == [[5, 7], [6, 8]]
        wait_until(lambda: not len(gateway.cell.registry), "the gateway follows nothing")
        assert gateway.metric("blockrelay_gateway_requests_waiting") == 0


def test_a_wrong_step_and_another_number_of_rows_leave_everything_as_it_is(
    gateway: RunningGateway, worker: PlayedWorker, pool: ThreadPoolExecutor
) -> None:
    run(gateway, worker, pool, batch([5], [6]), 2)
    for body, status, said in (
        (batch([5], [7]), 409, "expects step 2"),
        (batch([5], [7], step=3), 409, "expects step 2"),
        (batch([5], step=2), 400, "number of rows"),
        (batch([5], [6], [7], step=2), 400, "number of rows"),
        (batch([5], [600], step=2), 400, "600"),
        (batch([5], [1] * 600, step=2), 400, "context"),
    ):
        refused = gateway.post("/v1/infer", **body)
        assert (refused.status_code, said in refused.json()["message"]) == (status, True), refused.text
    assert [tokens_of(worker, f"chat#{row}") for row in range(3)] == [[5], [6], []]
    assert worker.client.zcard(worker.keys.running) == 0


def test_of_two_batches_for_one_step_one_gets_in_whole(
    settings: GatewaySettings, worker: PlayedWorker, pool: ThreadPoolExecutor
) -> None:
    with ExitStack() as stack:
        urls = [stack.enter_context(running_gateway(settings)).url for _ in range(2)]
        for step in range(1, 11):
            bodies = [batch([1], [10 + step], [5], step=step), batch([1], [30 + step], [5], step=step)]
            waiting = [ask(url, pool, body) for url, body in zip(urls, bodies, strict=True)]
            for claimed in worker.claim(3):
                worker.finish_tensor(claimed, logits_of(claimed))
            answers = [future.result() for future in waiting]
            assert sorted(answer.status_code for answer in answers) == [200, 409]
            winner = next(i for i, answer in enumerate(answers) if answer.status_code == 200)
            assert first_column(answers[winner]) == [[1], [10 + 20 * winner + step], [5]]
        assert [len(tokens_of(worker, f"chat#{row}")) for row in range(3)] == [10, 10, 10]
    assert worker.client.zcard(worker.keys.running) == 0


def test_limits_count_all_rows_and_a_refused_batch_leaves_nothing(
    settings: GatewaySettings, worker: PlayedWorker, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.json"
    ada = {"authorization": f"Bearer {add(keys, 'ada', concurrency=2, tokens_per_minute=15)}"}
    ben = {"authorization": f"Bearer {add(keys, 'ben')}"}
    tight = settings.model_copy(update={"api_keys": keys, "max_in_flight": 3})
    with running_gateway(tight) as gateway:
        for rows, headers, status, said in (
            (([1], [2], [3]), ada, 400, "2 under way"),
            (([1] * 8, [2] * 8), ada, 400, "16 tokens"),
            (([1], [2], [3], [4]), ben, 400, "2 under way"),
        ):
            refused = ask(gateway.url, pool, batch(*rows), **headers).result()
            assert (refused.status_code, said in refused.json()["message"]) == (status, True), refused.text
        assert not worker.client.keys("*session*") and worker.client.zcard(worker.keys.running) == 0
        accepted = ask(gateway.url, pool, batch([1] * 4, [2] * 4), **ada)
        for claimed in worker.claim(2):
            worker.finish_tensor(claimed, logits_of(claimed))
        assert first_column(accepted.result()) == [[1], [2]]
        refused = ask(gateway.url, pool, batch([1] * 2, [2] * 2, step=2), **ada).result()
        assert refused.status_code == 429 and "15 tokens per minute" in refused.json()["message"]
        assert tokens_of(worker, "ada/chat#0") == [1] * 4


def add(path: Path, name: str, **limits: Any) -> str:
    return add_key(path, Tenant(name=name, **limits))


def test_a_key_names_the_whole_batch(gateway: RunningGateway, worker: PlayedWorker, pool: ThreadPoolExecutor) -> None:
    body = {"input_tensors": {"input_ids": [[5], [6]]}}
    key = {"idempotency-key": "k-1"}
    assert run(gateway, worker, pool, body, 2, **key) == [[5], [6]]
    again = ask(gateway.url, pool, body, **key).result()
    assert first_column(again) == [[5], [6]] and again.headers["idempotent-replayed"] == "true"
    other = ask(gateway.url, pool, {"input_tensors": {"input_ids": [[5], [7]]}}, **key).result()
    assert other.status_code == 422


def test_what_the_cpu_took_over_is_told_for_every_row(
    gateway: RunningGateway, worker: PlayedWorker, pool: ThreadPoolExecutor
) -> None:
    waiting = ask(gateway.url, pool, batch([5], [6]))
    for claimed in worker.claim(2):
        if claimed.body.prompt[0] == 6:
            worker.scripts.run(calls.rerun(claimed.request_id, claimed.run_id, "gpu_error", block="block_2", stage=1))
            (claimed,) = worker.claim()
        worker.finish_tensor(claimed, logits_of(claimed))
    answer = waiting.result().json()
    assert answer["fallback_events"] == [
        {
            "block_id": "block_2",
            "blocks": ["block_2"],
            "from": "GPU",
            "to": "CPU",
            "reason": "gpu_error",
            "error_code": None,
            "success": True,
            "position": 0,
            "rows_recomputed": None,
        }
    ]
    stats = answer["execution_stats"]
    assert (stats["total_fallbacks"], len(answer["execution_times"])) == (1, 2)
    assert (stats["gpu_blocks_executed"], stats["cpu_blocks_executed"]) == (0, 2), "of rows that ran together"
