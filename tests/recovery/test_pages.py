"""KV pages are found instead of computed, by any worker that may know them, and no token changes for it."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.protocol.transitions import calls
from tests.support.cell import read_timeline
from tests.support.scraping import assert_service_describes_itself
from tests.support.systems.system import Job, StartSystem, System, assert_undisturbed, scrape, serve
from tests.support.waiting import wait_until

PROMPT = tuple(int(t) for t in np.random.default_rng(3).integers(3, 500, 200))  # twelve full pages and eight tokens
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
COMPUTED = "blockrelay_worker_prompt_tokens_total"
HITS = "blockrelay_worker_prefix_cache_hits_total"


def job(name: str, prompt: tuple[int, ...] = PROMPT, **params: object) -> Job:
    return Job(request_id=name, prompt=prompt, params=replace(GREEDY, **params))


@pytest.mark.parametrize("stages", [1, 3])
def test_a_second_request_with_the_same_beginning_computes_only_what_is_new(
    start_system: StartSystem, stages: int
) -> None:
    system = start_system(stages=stages)
    serve(system, [job("req-1")])
    assert system.metric(COMPUTED) == 200
    serve(system, [job("req-2"), job("req-3", (*PROMPT[:150], 7, 8), temperature=0.7)])
    assert system.metric(COMPUTED) == 200 + 8 + (2 + 150 - 144)
    assert system.metric(HITS) == 192 + 144
    end = system.log("req-2")[1]
    assert end is not None and end.meta["cached_tokens"] == 192
    assert system.reruns() == {}
    for worker in system.infos():
        assert_service_describes_itself(scrape(worker), "worker")


def test_without_the_cache_everything_is_computed(start_system: StartSystem) -> None:
    system = start_system(worker={"prefix_cache": "false"})
    serve(system, [job("req-1")])
    serve(system, [job("req-2")])
    assert system.metric(COMPUTED) == 400 and system.metric(HITS) == 0


@pytest.mark.parametrize(("stages", "tier"), [(1, "shm"), (2, "shm"), (1, "redis")])
def test_the_worker_after_a_kill_9_does_not_compute_the_prompt_again(
    start_system: StartSystem, shared_folder: Path, stages: int, tier: str
) -> None:
    settings = {"page_store_folder": str(shared_folder)} if tier == "shm" else {"page_store_redis_bytes": "10000000"}
    system = start_system(stages=stages, worker={**settings, "inject_speed": "0.1"})  # it is still in the middle then
    payload = system.payload.client()

    def stored() -> int:
        files = [path for path in shared_folder.iterdir() if not path.name.startswith(".")]
        return len(files) // stages if tier == "shm" else int(payload.zcard(system.keys.pages(system.model_key)))  # pyright: ignore

    long = job("req-1", max_tokens=280)
    system.accept(long)
    wait_until(lambda: stored() >= 13 and system.tokens_so_far([long]) > 20, "the prompt's pages are in the tier")
    for worker in system.workers:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    assert system.log("req-1")[1] is None, "it was in the middle"
    for _ in range(stages):
        system.start_worker(**settings)
    assert_undisturbed(system, [long])
    assert system.metric(COMPUTED) == 0, "the prompt and more of it was found"
    assert system.metric(HITS) >= 208
    assert system.reruns() == {"death": 1}
    payload.close()


def reruns_of(system: System, request_id: str) -> list[str]:
    """The reasons of its re-runs, in order."""
    events = read_timeline(system.client, system.keys, request_id)
    return [event["reason"] for event in events if event["event"] == "rerun"]


def test_a_later_stage_that_lost_its_pages_ends_in_a_cold_run_and_the_same_tokens(start_system: StartSystem) -> None:
    system = start_system(stages=2, scheduler_env={"BLOCKRELAY_VACANCY_S": "0.5"})
    serve(system, [job("req-1")])
    pid = system.pid_of(1)
    os.kill(pid, signal.SIGKILL)
    next(w for w in system.workers if w.pid == pid).wait()
    system.start_worker()

    def replaced() -> bool:
        return {w.stage for w in system.infos() if w.ready} == {0, 1} and pid not in {w.pid for w in system.infos()}

    wait_until(replaced, "the dead one is replaced")
    serve(system, [job("req-2")])
    assert reruns_of(system, "req-2") == ["missing_pages"]
    serve(system, [job("req-3")])
    assert reruns_of(system, "req-3") == [], "what ran cold is known afterwards"


def test_a_later_stage_that_lost_its_pages_finds_them_in_the_tier(
    start_system: StartSystem, shared_folder: Path
) -> None:
    settings = {"page_store_folder": str(shared_folder)}
    system = start_system(stages=2, worker=settings, scheduler_env={"BLOCKRELAY_VACANCY_S": "0.5"})
    serve(system, [job("req-1")])
    wait_until(lambda: len(list(shared_folder.iterdir())) >= 2 * 12, "all pages are written")
    os.kill(system.pid_of(1), signal.SIGKILL)
    system.start_worker(**settings)
    serve(system, [job("req-2")])
    assert "missing_pages" not in reruns_of(system, "req-2")


def test_many_requests_with_common_beginnings_in_small_pools_give_the_tokens_of_their_solo_runs(
    start_system: StartSystem, shared_folder: Path
) -> None:
    """Pages are shared, pushed out, loaded and missed all the time, on two workers per stage."""
    bytes_per_page = 2 * 2 * 2 * 16 * 16 * 2 * 4
    system = start_system(
        stages=2,
        replicas=2,
        worker={
            "kv_bytes": str(bytes_per_page * 16),
            "page_store_folder": str(shared_folder),
            "page_store_bytes": str(bytes_per_page * 24),
            "max_rows": "48",
        },
    )
    rng = np.random.default_rng(9)
    jobs: list[Job] = []
    for number in range(40):
        beginning = PROMPT[50 * (number % 3) :][: int(rng.integers(1, 120))]
        prompt = (*beginning, *(int(t) for t in rng.integers(3, 500, rng.integers(1, 20))))
        jobs.append(job(f"req-{number}", prompt, temperature=0.8 * (number % 2)))
    serve(system, jobs)
    assert system.metric(HITS) > 0


def test_a_session_step_computes_only_its_new_tokens(start_system: StartSystem) -> None:
    system = start_system(stages=2)

    def step(name: str, tokens: int, prior: int, salt: str = "") -> bytes:
        body = RequestBody(
            prompt=np.array(PROMPT[:tokens], np.int32),
            params=SamplingParams(max_tokens=0, temperature=0.0).to_dict(),
            logits="all",
            prior=prior,
            salt=salt,
        )
        call = calls.accept(name, body, model=system.model_key, pages_needed=20, max_in_flight=100)
        assert system.scripts.run(call).status == "OK"
        wait_until(lambda: system.log(name)[1] is not None, "the step ends")
        client = system.payload.client()
        result = client.get(system.keys.result(name))
        client.close()
        assert isinstance(result, bytes)
        return result

    step("req-1", 100, 0)
    second = step("req-2", 150, 100)
    assert system.metric(COMPUTED) == 100 + (150 - 96)
    assert step("req-3", 150, 100, salt="other") == second, "the same bits, computed from the beginning"
    assert system.metric(COMPUTED) == 100 + (150 - 96) + 150
    assert step("req-4", 150, 100) == second


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_precision_that_is_not_exact_shares_nothing(
    start_system: StartSystem, tmp_path: Path, shared_folder: Path, precision: str
) -> None:
    from blockrelay_converter.convert import convert
    from tests.support.models.checkpoints import write_checkpoint

    write_checkpoint(tmp_path / "checkpoint", seed=3)
    convert(tmp_path / "checkpoint", tmp_path / "model", precision=precision, report=lambda *_: None, name="tiny")
    system = start_system(model=tmp_path / "model", worker={"page_store_folder": str(shared_folder)})
    serve(system, [job("req-1")])
    serve(system, [job("req-2")])
    assert system.metric(COMPUTED) == 400
    assert list(shared_folder.iterdir()) == []


@pytest.mark.parametrize("tier", ["shm", "redis"])
def test_a_page_store_that_is_wiped_in_mid_run_costs_time_and_no_token(
    start_system: StartSystem, shared_folder: Path, tier: str
) -> None:
    """Again and again, while two workers push each other's pages out; the inboxes on the payload Redis go with them."""
    settings = {"page_store_folder": str(shared_folder)} if tier == "shm" else {"page_store_redis_bytes": "10000000"}
    bytes_per_page = 2 * 4 * 2 * 16 * 16 * 2
    system = start_system(stages=2, worker={**settings, "kv_bytes": str(bytes_per_page * 20)})
    jobs = [job(f"req-{i}", PROMPT[: 60 + 10 * i], max_tokens=100, temperature=0.8 * (i % 2)) for i in range(8)]
    payload = system.payload.client()
    system.accept_all(jobs)
    for share in (1, 2, 4):
        wait_until(lambda s=share: system.tokens_so_far(jobs) > 80 * s, "they are under way")
        if tier == "redis":
            payload.flushall()
        else:
            for file in list(shared_folder.iterdir()):
                file.unlink(missing_ok=True)
    payload.close()
    assert_undisturbed(system, jobs)
