"""A CPU on which a row takes a hundred times as long as it should: no limit on a step ends a worker that computes."""

from pathlib import Path

import numpy as np

from blockrelay.protocol.sampling_params import SamplingParams
from tests.support.models.tiny_model import write_tiny_model
from tests.support.systems.system import Job, StartSystem, assert_nothing_is_held, serve

PROMPT = 2000
#: A batch of 512 rows would take 2 s, and a step of a worker may take less.
ROW_S, LIMIT_S = 0.004, "1.5"


def test_a_slow_worker_serves_a_long_prompt_to_its_end(start_system: StartSystem, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, context=PROMPT + 100)
    system = start_system(model=model, replicas=0, scheduler=False)
    system.start_scheduler()
    worker = system.start_slow_worker(row_s=ROW_S, session_timeout_s=LIMIT_S, beat_s="0.1")
    system.wait_ready(1)
    tokens = np.random.default_rng(1).integers(3, 500, PROMPT)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    job = Job(request_id="long", prompt=tuple(map(int, tokens)), params=params)
    serve(system, [job])
    assert worker.poll() is None, "the same process, from the first row to the last"
    assert int(system.client.hget(system.keys.request("long"), "reruns") or 0) == 0  # pyright: ignore
    assert_nothing_is_held(system)
