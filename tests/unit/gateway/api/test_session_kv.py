"""KV in tensor steps: what a client may give and ask for, and what of it is where meanwhile."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.encoding.kv_pages import KvShape, field
from blockrelay.protocol.messages import Claimed
from blockrelay.protocol.tensors import decode_tensor
from tests.support.gateway.played import PlayedWorker, RunningGateway
from tests.support.json_tensors import json_tensor
from tests.support.waiting import wait_until

#: One full page and four tokens of the next.
TOKENS = list(range(3, 23))


def kv(folder: BlockFolder, positions: int, *, rows: int = 1, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Made-up KV of the model's only layer."""
    rng = np.random.default_rng(seed)
    shape = (rows, folder.model.kv_heads, positions, folder.model.head_dim)
    return {f"past_key_values.0.{half}": rng.standard_normal(shape).astype(np.float32) for half in ("key", "value")}


def step(tokens: list[int] | list[list[int]], past: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    given = {name: json_tensor(array) for name, array in (past or {}).items()}
    return {"input_tensors": {"input_ids": tokens, **given}, **more}


def shape_of(folder: BlockFolder) -> KvShape:
    return KvShape(folder.model.kv_heads, folder.model.head_dim, np.float32)


def finish(worker: PlayedWorker, claimed: Claimed, vocabulary: int, kept: dict[str, bytes] | None = None) -> None:
    """End the step; `kept` is stored as the KV that it asked for."""
    if kept:
        worker.client.hset(worker.keys.kv_asked(claimed.request_id), mapping=kept)  # pyright: ignore
        worker.client.expire(worker.keys.kv_asked(claimed.request_id), 60)
    worker.finish_tensor(claimed, np.zeros((1, vocabulary), np.float32))


def test_given_kv_is_there_before_the_step_is_and_gone_when_it_is_answered(
    gateway: RunningGateway, worker: PlayedWorker, folder: BlockFolder
) -> None:
    past, shape = kv(folder, 17), shape_of(folder)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(gateway.post, "/v1/infer", **step(TOKENS, past))
        (claimed,) = worker.claim()
        assert (claimed.body.kv_given, claimed.body.kv_asked) == (16, ())
        stored: Any = worker.client.hgetall(worker.keys.kv_given(claimed.request_id))
        (page,) = shape.to_pages(*(array[0] for array in past.values()))
        assert stored == {field(0, 0).encode(): page}, "full pages only"
        keys, values = shape.split(page)
        assert (keys.transpose(0, 2, 1) == past["past_key_values.0.key"][0, :, :16]).all()
        assert (values == past["past_key_values.0.value"][0, :, :16]).all()
        assert 0 < worker.client.ttl(worker.keys.kv_given(claimed.request_id)) <= 600  # pyright: ignore
        finish(worker, claimed, folder.model.vocab_size)
        assert waiting.result().status_code == 200
        wait_until(lambda: not worker.client.exists(worker.keys.kv_given(claimed.request_id)), "it is needed no more")


def test_what_a_refused_step_gave_is_gone(gateway: RunningGateway, worker: PlayedWorker, folder: BlockFolder) -> None:
    refused = gateway.post("/v1/infer", **step(TOKENS, kv(folder, 17), session_id="s", step=5))
    assert refused.status_code == 409
    assert not list(worker.client.scan_iter(worker.keys.kv_given("*")))


@pytest.mark.parametrize("rows", [1, 2])
def test_the_kv_of_blocks_is_an_output_of_the_step(
    gateway: RunningGateway, worker: PlayedWorker, folder: BlockFolder, rows: int
) -> None:
    shape = shape_of(folder)
    padded = kv(folder, 32, rows=rows)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(gateway.post, "/v1/infer", **step([TOKENS] * rows, blocks="1-2"))
        for claimed in worker.claim(rows):
            assert claimed.body.kv_asked == (0,)
            row = min(rows - 1, int(claimed.body.group != "" and claimed.request_id != claimed.body.group))
            pages = shape.to_pages(*(array[row] for array in padded.values()))
            finish(worker, claimed, folder.model.vocab_size, {field(i, 0): page for i, page in enumerate(pages)})
        outputs = waiting.result().json()["outputs"]
    assert list(outputs) == ["logits", "present.0.key", "present.0.value"]
    for half in ("key", "value"):
        found = decode_tensor(outputs[f"present.0.{half}"], param="kv", max_elements=1 << 20)
        assert found.dtype == np.float32 and found.shape[2] == len(TOKENS)
        assert (found == padded[f"past_key_values.0.{half}"][:, :, : len(TOKENS)]).all()


def test_kv_that_is_gone_is_computed_once_more(
    gateway: RunningGateway, worker: PlayedWorker, folder: BlockFolder
) -> None:
    pages = shape_of(folder).to_pages(*(array[0] for array in kv(folder, 32).values()))
    kept = {field(i, 0): page for i, page in enumerate(pages)}
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(gateway.post, "/v1/infer", **step(TOKENS, session_id="s", step=1, blocks="1"))
        (first,) = worker.claim()
        finish(worker, first, folder.model.vocab_size, {field(0, 0): pages[0]})  # the second page is lost
        (again,) = worker.claim()
        assert again.body.kv_asked == (0,) and again.request_id != first.request_id
        finish(worker, again, folder.model.vocab_size, kept)
        assert "present.0.key" in waiting.result().json()["outputs"]


def test_a_step_again_with_other_kv_is_another_step(
    gateway: RunningGateway, worker: PlayedWorker, folder: BlockFolder
) -> None:
    with ThreadPoolExecutor() as pool:
        body = step(TOKENS, kv(folder, 16), session_id="s", step=1)
        waiting = pool.submit(gateway.post, "/v1/infer", **body)
        (claimed,) = worker.claim()
        finish(worker, claimed, folder.model.vocab_size)
        first = waiting.result()
    assert first.status_code == 200
    assert gateway.post("/v1/infer", **body).json()["outputs"] == first.json()["outputs"]
    other = gateway.post("/v1/infer", **step(TOKENS, kv(folder, 16, seed=1), session_id="s", step=1))
    assert other.status_code == 409


KEY = "input_tensors.past_key_values.0.key"


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"blocks": "0"}, "blocks", "block_1 to block_2"),
        ({"blocks": "2-1"}, "blocks", "block_1 to block_2"),
        ({"blocks": "1-3"}, "blocks", "block_1 to block_2"),
        ({"blocks": "one"}, "blocks", "not 'one'"),
        ({"blocks": "2"}, "blocks", "block_2 has no layer"),
        ({"given": {"past_key_values.0.key": np.zeros((1, 2, 4, 8), np.float32)}}, "", "is missing"),
        ({"given": {"past_key_values.1.key": np.zeros((1, 2, 4, 8), np.float32)}}, "", "layers 0 to 0, not 1"),
        ({"type": np.float16}, KEY, "must be float32"),
        ({"rows": 2}, KEY, "not float32 [2, "),
        ({"positions": 20}, "input_tensors.input_ids", "at least one behind them"),
        ({"value": np.inf}, KEY, "not finite"),
        ({"twice": "past_key_values_key_0"}, "input_tensors.past_key_values_key_0", "twice"),
    ],
)
def test_what_cannot_be_given_or_asked_for_is_named(
    gateway: RunningGateway, worker: PlayedWorker, folder: BlockFolder, change: dict[str, Any], param: str, says: str
) -> None:
    past = kv(folder, change.get("positions", 16), rows=change.get("rows", 1))
    past = {name: array.astype(change.get("type", np.float32)) for name, array in past.items()}
    if "value" in change:
        past["past_key_values.0.key"][0, 0, 3, 0] = change["value"]
    if "twice" in change:
        past[change["twice"]] = past["past_key_values.0.key"]
    body = step(TOKENS, change.get("given", past if "blocks" not in change else None))
    answer = gateway.post("/v1/infer", **body, **({"blocks": change["blocks"]} if "blocks" in change else {}))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert says in error["message"] and param in error["param"], error
    assert worker.client.zcard(worker.keys.running) == 0 and not list(worker.client.scan_iter("*kv-given*"))


def test_rows_of_different_lengths_have_no_kv_in_common(gateway: RunningGateway, worker: PlayedWorker) -> None:
    body = step([[1, 2, 3], [4, 5, 6]], blocks="1")
    body["input_tensors"]["attention_mask"] = [[1, 1, 1], [0, 1, 1]]
    answer = gateway.post("/v1/infer", **body)
    assert answer.status_code == 400 and "padding" in answer.json()["error"]["message"]
    text = gateway.post("/v1/infer", prompt=[1, 2], blocks="1")
    assert text.status_code == 400 and text.json()["error"]["param"] == "blocks"


def test_a_session_is_shown_with_its_pages_on_each_stage(
    gateway: RunningGateway, worker: PlayedWorker, folder: BlockFolder
) -> None:
    def seen() -> dict[str, Any]:
        return httpx.get(f"{gateway.url}/v1/sessions/s").json()

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(gateway.post, "/v1/infer", **step([TOKENS, TOKENS], session_id="s", step=1))
        claimed = worker.claim(2)
        running = seen()
        assert running["states"] == ["running", "running"] and running["tokens"] == [20, 20]
        for one in claimed:
            finish(worker, one, folder.model.vocab_size)
        assert waiting.result().status_code == 200
    for found in (running, seen()):
        assert (found["object"], found["session_id"], found["step"], found["rows"]) == ("session", "s", 1, 2)
        head = {"stage": 1, "worker": "w1", "there": True, "blocks": "2-2", "device": "cpu", "layers": 0}
        size = 4 * 2 * shape_of(folder).half_bytes
        assert found["stages"] == [
            {**head, "stage": 0, "worker": "w0", "blocks": "1-1", "layers": 1, "pages": 4, "kv_bytes": size},
            {**head, "pages": 0, "kv_bytes": 0},
        ]
    assert seen()["states"] == ["completed", "completed"]
    beat: Any = worker.client.zscore(worker.keys.workers, "w0")
    worker.client.zadd(worker.keys.workers, {"w0": beat - 60_000})
    gone = seen()["stages"][0]
    assert (gone["there"], gone["pages"], gone["worker"]) == (False, 0, "w0")
    missing = httpx.get(f"{gateway.url}/v1/sessions/other")
    assert missing.status_code == 404 and "other" in missing.json()["error"]["message"]
