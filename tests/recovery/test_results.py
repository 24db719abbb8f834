"""Tensor results and the payload Redis that keeps them."""

import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np

from blockrelay.protocol.constants import RESULT_S
from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.protocol.tensors import decode_tensor, result_bytes
from blockrelay.protocol.transitions import calls
from tests.support.systems.system import StartSystem, make_jobs
from tests.support.waiting import wait_until


def test_a_result_that_cannot_be_stored_holds_up_nobody(start_system: StartSystem) -> None:
    """The payload Redis stands still as a tensor step ends; those beside it go on, and its end waits for its result."""
    system = start_system()
    assert system.payload.process is not None
    params = SamplingParams(max_tokens=0, temperature=0.0)
    body = RequestBody(prompt=np.arange(3, 40, dtype=np.int32), params=params.to_dict(), logits="all")
    system.payload.process.send_signal(signal.SIGSTOP)
    try:
        call = calls.accept("req-tensor", body, model=system.model_key, pages_needed=3, max_in_flight=10)
        assert system.scripts.run(call).status == "OK"
        record = system.keys.request("req-tensor")
        wait_until(lambda: system.client.hget(record, "state") == b"running", "the step runs")
        jobs = make_jobs(2, seed=3, vocab=500)
        system.accept_all(jobs)
        system.wait_all(jobs)
        assert system.log("req-tensor")[1] is None, "nobody hears of a result that is not there"
    finally:
        system.payload.process.send_signal(signal.SIGCONT)
    wait_until(lambda: system.log("req-tensor")[1] is not None, "the step has ended")
    with system.payload.client() as payload:
        value = payload.get(system.keys.result("req-tensor"))
        assert isinstance(value, bytes) and len(value) == result_bytes(37, system.block_folder.model.vocab_size)
        left = payload.ttl(system.keys.result("req-tensor"))
        assert isinstance(left, int) and 0 < left <= RESULT_S


def test_results_that_would_fill_the_payload_redis_are_refused_and_no_other(start_system: StartSystem) -> None:
    """Ten at once would: three fit, seven hear when to come again, and find room once what was read is gone."""
    system = start_system()
    tokens = list(range(3, 403))
    size = result_bytes(len(tokens), system.block_folder.model.vocab_size)
    with system.payload.client() as payload:
        payload.config_set("maxmemory", 3 * 3 * size + 1000)
        used = payload.info("memory")["used_memory"]  # pyright: ignore
        assert used + 10 * size > 3 * 3 * size + 1000, "they would fill it"
    url, _ = system.start_gateway()
    body = {"input_tensors": {"input_ids": [tokens]}, "logits": "all"}

    def ask() -> httpx.Response:
        return httpx.post(f"{url}/v1/infer", json=body, timeout=60)

    system.workers[0].send_signal(signal.SIGSTOP)  # so that none ends before the last has come
    with ThreadPoolExecutor(10) as threads:
        waiting = [threads.submit(ask) for _ in range(10)]
        wait_until(lambda: sum(answer.done() for answer in waiting) == 7, "seven are refused")
        refused = [answer.result() for answer in waiting if answer.done()]
        system.workers[0].send_signal(signal.SIGCONT)
        answers = [answer.result() for answer in waiting if answer.result() not in refused]
    for answer in refused:
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        assert "payload Redis" in answer.json()["error"]["message"]
    values = []
    for answer in answers:
        assert answer.status_code == 200, answer.text
        values.append(decode_tensor(answer.json()["outputs"]["logits"], param="logits", max_elements=1 << 20))
    assert len(values) == 3 and all(np.array_equal(value, values[0]) for value in values)
    wait_until(lambda: ask().status_code == 200, "there is room again")
    with system.payload.client() as payload:
        assert "errorstat_OOM" not in payload.info("errorstats"), "nothing was ever refused for want of memory"  # pyright: ignore
