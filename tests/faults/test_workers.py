"""Every point of a worker, once with each action: tokens are those of the undisturbed run and nothing is left held."""

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blockrelay.failpoints import FAILURES, POINTS
from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.protocol.transitions import calls
from tests.support.systems.fault_stand import Stand, registered, standing
from tests.support.waiting import wait_until

#: Effects that only the last stage has; all others are tried at the first.
LAST = ("receive", "commit", "early_job", "result")
#: Passages in the middle of the work; the first one elsewhere.
PASSAGES = {"compute": 9, "forward": 7, "receive": 7, "commit": 11, "early_job": 5}
#: What else must happen so that the point is passed.
TRIGGERS = {
    "rerun": "worker.before_forward:raise@4",  # a message that is lost is run again
    "finish": "worker.before_compute:raise@9",  # a request whose batch of one fails ends
}
DRAINS, TENSORS = ("dead",), ("result",)
EFFECTS = {point: point.split("_", 1)[1] for point in POINTS if point.startswith("worker.")}
#: Some of all for the default suite.
QUICK = ("worker.after_claim:kill", "worker.after_commit:kill", "worker.before_commit:stop")
CASES = [f"{point}:{action}" for action in ("kill", "stop") for point in EFFECTS]


@pytest.fixture(scope="module")
def stand(tiny_model: Path) -> Iterator[Stand]:
    with standing(tiny_model) as running:
        yield running


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.faults) for case in CASES]
)
def test_a_worker_dies_or_sleeps_at_every_point(stand: Stand, case: str) -> None:
    point, action = case.split(":")
    effect = EFFECTS[point]
    stage = 1 if effect in LAST else 0
    stand.full()
    undisturbed = tensors(stand, f"{case}-before") if effect == "result" else b""
    stand.vacate(stage)
    jobs = stand.accept(1 if effect == "finish" else 3)
    step = accept_tensors(stand, case) if effect == "result" else ""
    trigger = [TRIGGERS[effect]] if effect in TRIGGERS else []
    with stand.victim(stand.worker(failpoint=",".join([f"{case}@{PASSAGES.get(effect, 1)}", *trigger]))) as victim:
        if effect == "dead":  # the drain
            wait_until(lambda: stand.system.tokens_so_far(jobs) > 30, "it works")
            victim.terminate()
        stand.wait_sprung(victim, point, action)
        wait_until(lambda: victim.pid not in registered(stand), "it is declared dead")
        stand.worker()
        if point == "worker.after_finish":
            stand.check_failed(jobs[0])
        else:
            stand.check(jobs)
        if step:
            wait_until(lambda: stand.system.log(step)[1] is not None, "the tensor step ends")
            assert result_of(stand, step) == undisturbed
        if action == "stop":
            victim.send_signal(signal.SIGCONT)
            wait_until(lambda: victim.pid in registered(stand) or victim.poll() is not None, "it comes back")
            if point == "worker.before_commit":
                # Promised is the refusal. The worker itself may have learned first that it is gone, and not listen.
                wait_until(lambda: stand.system.refused_commits(victim.pid), "its late COMMIT is refused")
            victim.terminate()
            assert victim.wait(30) == 0
            if point != "worker.after_finish":
                stand.check(jobs)


@pytest.mark.faults
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("action", ["raise", "delay=0.2"])
def test_a_worker_loses_redis_or_waits_at_every_point(stand: Stand, action: str, stage: int) -> None:
    name = action.partition("=")[0]
    points = [
        point
        for point, effect in EFFECTS.items()
        if (effect in LAST) == bool(stage) and effect not in ("finish", "dead", "rerun", "result")
        if name == "delay" or (FAILURES[point] is not None and effect != "compute")
    ]
    points += ["worker.before_rerun", "worker.after_rerun"] if (name, stage) == ("raise", 0) else []
    stand.full()
    stand.vacate(stage)
    jobs = stand.accept()
    with stand.victim(
        stand.worker(failpoint=",".join(f"{p}:{action}@{PASSAGES.get(EFFECTS[p], 1)}" for p in points))
    ) as victim:
        stand.check(jobs)
        for point in points:
            stand.wait_sprung(victim, point, name)
        assert victim.poll() is None
        victim.terminate()
        assert victim.wait(30) == 0


def test_a_worker_that_was_declared_dead_before_anybody_planned_gets_a_stage(stand: Stand) -> None:
    """While no scheduler runs nobody would ever name it in a plan, for it writes its record once."""
    stand.full()
    assert stand.system.scheduler is not None
    stand.system.scheduler.terminate()
    assert stand.system.scheduler.wait(30) == 0
    stand.vacate(0)
    with stand.victim(stand.worker()) as worker:
        wait_until(lambda: worker.pid in registered(stand), "it has registered")
        (name,) = [w.id for w in stand.system.infos() if w.pid == worker.pid]
        stand.system.scripts.run(calls.dead(name, silent_s=0))
        jobs = stand.accept()
        stand.system.start_scheduler()
        stand.check(jobs)
        (again,) = [w for w in stand.system.infos() if w.pid == worker.pid]
        assert again.ready and again.id != name
        worker.terminate()
        assert worker.wait(30) == 0


def accept_tensors(stand: Stand, name: str) -> str:
    """A request for logits of nine tokens; its id."""
    params = SamplingParams(max_tokens=0, temperature=0.0).to_dict()
    body = RequestBody(prompt=np.arange(3, 12, dtype=np.int32), params=params, logits="all")
    request_id = f"req-tensors-{name}"
    call = calls.accept(request_id, body, model=stand.system.model_key, pages_needed=1, max_in_flight=100)
    assert stand.system.scripts.run(call).status == "OK"
    return request_id


def result_of(stand: Stand, request_id: str) -> bytes:
    client = stand.system.payload.client()
    value = client.get(stand.system.keys.result(request_id))
    client.close()
    assert isinstance(value, bytes)
    return value


def tensors(stand: Stand, name: str) -> bytes:
    request_id = accept_tensors(stand, name)
    wait_until(lambda: stand.system.log(request_id)[1] is not None, "the tensor step ends")
    return result_of(stand, request_id)
