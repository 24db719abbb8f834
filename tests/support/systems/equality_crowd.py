"""Many clients of a running system at once, and what its workers counted meanwhile."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.tensors import decode_tensor
from blockrelay.redis import client as redis_link
from blockrelay.redis.registry import read_workers
from blockrelay.up_file import read_running
from tests.support.gateway.sse_client import read_events
from tests.support.systems.equality_workload import Asked
from tests.support.systems.solo_runs import Answer, logits_digest
from tests.support.systems.up_process import UpProcess

#: Seconds that one request may take on a busy machine.
PATIENCE_S = 240


def ask_in_waves(
    url: str, asks: Sequence[Asked], *, seed: int, at_once: int = 40, halfway: Callable[[], None] = lambda: None
) -> list[Answer]:
    """Answers in the order of `asks`. They are sent in waves of random size; the next wave goes when few enough of the
    ones before are left, so that every batch mixes beginnings, middles and ends. `halfway` is called once, in between.
    """
    rng = np.random.default_rng(seed)
    done = threading.Semaphore(0)
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as http, ThreadPoolExecutor(at_once) as pool:

        def one(asked: Asked) -> Answer:
            try:
                return _ask(http, asked)
            finally:
                done.release()

        answers = []
        running = 0
        called = False
        for asked in asks:
            answers.append(pool.submit(one, asked))
            running += 1
            if not called and len(answers) * 2 >= len(asks):
                called = True
                halfway()
            if running == at_once or rng.random() < 0.1:
                for _ in range(int(rng.integers(1, running + 1))):
                    done.acquire()
                    running -= 1
        return [answer.result() for answer in answers]


def _ask(http: httpx.Client, asked: Asked) -> Answer:
    if asked.tensor:
        return _tensor(http, asked)
    body = {**asked.params.to_dict(), "prompt": list(asked.prompt), "return_token_ids": True, "stream": asked.stream}
    body = {name: value for name, value in body.items() if value is not None and value != []}
    if not asked.stream:
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, f"{asked.name}: {answer.text}"
        choice = answer.json()["choices"][0]
        return Answer(
            tokens=choice["token_ids"],
            text=choice["text"],
            finish_reason=choice["finish_reason"],
            logprobs=_logprobs([choice["logprobs"]] if choice["logprobs"] else [], asked),
        )
    tokens: list[int] = []
    text = reason = ""
    parts: list[dict[str, Any]] = []
    with http.stream("POST", "/v1/completions", json=body) as stream:
        assert stream.status_code == 200, f"{asked.name}: {stream.read()!r}"
        for event in read_events(stream):
            for choice in [] if event.data == "DONE" else event.data["choices"]:
                tokens += choice["token_ids"]
                text += choice["text"]
                reason = choice["finish_reason"] or reason
                parts += [choice["logprobs"]] if choice["logprobs"] else []
    return Answer(tokens=tokens, text=text, finish_reason=reason, logprobs=_logprobs(parts, asked))


def _logprobs(parts: list[dict[str, Any]], asked: Asked) -> list[list[float]] | None:
    if asked.params.logprobs is None:
        assert not parts
        return None
    return [
        [value, *best.values()]
        for part in parts
        for value, best in zip(part["token_logprobs"], part["top_logprobs"], strict=True)
    ]


def _tensor(http: httpx.Client, asked: Asked) -> Answer:
    tensor = {"_tensor_": True, "data": [list(asked.prompt)]}
    body = {"session_id": asked.name, "step": 1, "logits": "all", "input_tensors": {"input_ids": tensor}}
    answer = http.post("/v1/infer", json=body).json()
    assert answer["status"] == "success", f"{asked.name}: {answer}"
    rows = decode_tensor(answer["outputs"]["logits"], param="logits", max_elements=1 << 24)
    return Answer(tokens=[], logits=logits_digest(rows[0]))


def worker_counters(up: UpProcess) -> "Counter[str]":
    """Every sample of the live workers by name (labels in braces but for `cell` and `model`), added up."""
    assert up.data is not None
    running = read_running(up.data)
    client = redis_link.connect(running.redis_url)
    try:
        model = open_block_folder(running.model, blocks=[]).model_key
        workers = read_workers(client, Keys(running.cell), model)
    finally:
        client.close()
    total: Counter[str] = Counter()
    for worker in workers:
        if worker.silent_ms > 3000:
            continue
        text = httpx.get(f"http://127.0.0.1:{worker.port}/metrics").text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(
                    f'{name}="{value}"'
                    for name, value in sorted(sample.labels.items())
                    if name not in ("cell", "model")
                )
                total[f"{sample.name}{{{labels}}}" if labels else sample.name] += sample.value  # pyright: ignore
                if labels:
                    total[sample.name] += sample.value  # pyright: ignore
    return total
