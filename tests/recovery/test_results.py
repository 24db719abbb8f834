"""Tensor results and the payload Redis that keeps them."""

import signal

import numpy as np

from blockrelay import scripts as calls
from blockrelay.messages import RequestBody
from blockrelay.sampling_params import SamplingParams
from blockrelay.tensors import decode_result
from tests.support.system import StartSystem, make_jobs
from tests.support.waiting import wait_until


def test_a_result_that_cannot_be_stored_holds_up_nobody(start_system: StartSystem) -> None:
    """The payload Redis stands still as a tensor step ends; those beside it go on, and its end waits for its result."""
    system = start_system()
    assert system.payload.process is not None
    params = SamplingParams(max_tokens=0, temperature=0.0)
    body = RequestBody(prompt=np.arange(3, 40, dtype=np.int32), params=params.to_dict(), logits="all")
    system.payload.process.send_signal(signal.SIGSTOP)
    try:
        call = calls.accept("req-tensor", body, model=system.model_key, need_pages=3, max_in_flight=10)
        assert system.scripts.run(call).status == "OK"
        record = system.keys.request("req-tensor")
        wait_until(lambda: system.client.hget(record, "state") == b"running", "the step runs")
        jobs = make_jobs(2, seed=3, vocab=500)
        for job in jobs:
            system.accept(job)
        system.wait_all(jobs)
        assert system.log("req-tensor")[1] is None, "nobody hears of a result that is not there"
    finally:
        system.payload.process.send_signal(signal.SIGCONT)
    wait_until(lambda: system.log("req-tensor")[1] is not None, "the step has ended")
    payload = system.payload.client()
    value = payload.get(system.keys.result("req-tensor"))
    payload.close()
    assert isinstance(value, bytes) and decode_result(value).shape[0] == 37
