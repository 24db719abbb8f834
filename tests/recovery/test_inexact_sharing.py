"""A device that does not compute the same bits twice shares pages between requests and is given guesses, where it may.

It is ONNX Runtime's own CPU provider, under the class gpu.
"""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.redis.registry import read_plan
from blockrelay.settings import BUNDLED_MODEL
from tests.support.scraping import sampled
from tests.support.systems.device_processes import child_of
from tests.support.systems.system import Job, StartSystem, System, assert_nothing_is_held, scrape
from tests.support.waiting import wait_until

PARAMS = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
PAGES = 16 * (600 // 16)
#: It says the same again and again, so that a guess is easily right.
PROMPT = tuple(int(token) for token in np.tile(np.random.default_rng(3).integers(3, 500, 60), 10))


def whole_model(start_system: StartSystem, folder: Path, **settings: str) -> System:
    """A CPU worker and a GPU worker, each with the whole model, where the plan has the GPU's."""
    system = start_system(stages=1, worker={"page_store_folder": str(folder)}, model=BUNDLED_MODEL)
    system.start_worker(device="gpu", gpu="cpu", page_store_folder=str(folder), **settings)
    system.wait_ready(2)

    def planned() -> bool:
        plan = read_plan(system.client, system.keys, system.model_key)
        return plan is not None and plan.route_class == "gpu"

    wait_until(planned, "the plan has a GPU stage")
    return system


def cached(system: System, job: Job) -> int:
    """How many tokens of its prompt were found, now that it has ended."""
    system.wait_all([job])
    tokens, end = system.log(job.request_id)
    assert end is not None and end.reason == "length" and len(tokens) == job.params.max_tokens
    return int(end.meta["cached_tokens"])


def ask(system: System, request_id: str, **more: Any) -> Job:
    job = Job(request_id=request_id, prompt=PROMPT, params=replace(PARAMS, **more))
    system.accept(job)
    return job


@pytest.mark.parametrize("sharing", ["off", "on"])
def test_a_second_request_finds_what_the_first_has_computed_where_it_may(
    start_system: StartSystem, shared_folder: Path, sharing: str
) -> None:
    system = whole_model(start_system, shared_folder, inexact_sharing=sharing)
    found = [cached(system, ask(system, request)) for request in ("first", "second")]
    (gpu,) = [info for info in system.infos() if info.device == "gpu"]
    drafts = sampled(scrape(gpu), "blockrelay_worker_spec_decode_num_draft_tokens_total")
    assert (found, drafts > 0) == (([0, PAGES], True) if sharing == "on" else ([0, 0], False))
    # And a new process of the device has none of it
    os.kill(child_of(system.workers[-1].pid), signal.SIGKILL)
    wait_until(lambda: gpu.id not in {info.id for info in system.infos()}, "it is lost")
    system.wait_ready(2)
    assert cached(system, ask(system, "third")) == 0
    assert_nothing_is_held(system)


def test_pages_of_others_are_a_stand_ins_too(start_system: StartSystem, shared_folder: Path) -> None:
    """Who began with pages that another request has computed goes on from them when the device dies."""
    system = whole_model(start_system, shared_folder, inexact_sharing="on")
    assert cached(system, ask(system, "first")) == 0
    second = ask(system, "second", max_tokens=300)
    wait_until(lambda: len(system.log("second")[0]) >= 20, "it is under way")
    child = child_of(system.workers[-1].pid)
    os.kill(child, signal.SIGKILL)
    assert cached(system, second) >= PAGES
    _, end = system.log("second")
    assert end is not None
    (event,) = end.fallbacks
    assert event.rows_recomputed is not None and event.rows_recomputed <= 64
    assert_nothing_is_held(system)
