"""Two cells behind one gateway: names in Redis, a played worker in each, and what is asked of them."""

import base64
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import numpy as np
import redis

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.encoding.request_ids import parse_id
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import Claimed
from blockrelay.redis.client import Scripts
from tests.support.gateway.played import PlayedWorker, RunningGateway, answering
from tests.support.waiting import wait_until

NAMES = ("c0", "c1")
BODY: dict[str, Any] = {"prompt": "Anna", "max_tokens": 4}


def worker_of(name: str, client: redis.Redis, folder: BlockFolder) -> PlayedWorker:
    scripts, keys = Scripts(client, Keys(name)), Keys(name)
    return PlayedWorker(client=client, scripts=scripts, keys=keys, model=folder.model_key).register()


@contextmanager
def all_answer(workers: Mapping[str, PlayedWorker]) -> Iterator[None]:
    """Each cell has a token of its own."""
    with ExitStack() as both:
        for index, worker in enumerate(workers.values()):
            both.enter_context(answering(worker, lambda _, token=5 + index: ([token], "stop")))
        yield


@contextmanager
def tensors_answered(workers: Mapping[str, PlayedWorker]) -> Iterator[None]:
    """Each step has the logits 0."""

    def answered_by(worker: PlayedWorker) -> Callable[[Claimed], None]:
        return lambda claimed: worker.finish_tensor(claimed, np.zeros((1, 512), np.float32))

    with ExitStack() as both:
        for worker in workers.values():
            both.enter_context(answering(worker, answered_by(worker)))
        yield


def cell_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    found = parse_id(answer.headers["x-request-id"])
    assert found is not None
    return found.cell


def post(gateway: RunningGateway, key: str | None = None, **body: Any) -> httpx.Response:
    return gateway.http.post("/v1/completions", json={**BODY, **body}, headers={"Idempotency-Key": key} if key else {})


def knows(gateway: RunningGateway, version: int) -> None:
    wait_until(lambda: gateway.gateway.cells.file.lists[-1].version == version, "the gateway has read the list")


def step(gateway: RunningGateway, session: str, number: int, *tokens: int, rows: int = 1) -> httpx.Response:
    ids = np.array([tokens] * rows, np.int64)
    tensor = {
        "_tensor_": True,
        "dtype": "int64",
        "shape": list(ids.shape),
        "data_b64": base64.b64encode(ids.tobytes()).decode(),
    }
    return gateway.http.post(
        "/v1/infer", json={"input_tensors": {"input_ids": tensor}, "session_id": session, "step": number}
    )


def session_in(client: redis.Redis, session: str) -> set[str]:
    return {name for name in NAMES if any(client.exists(Keys(name).session(one)) for one in (session, f"{session}#0"))}
