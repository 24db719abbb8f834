"""Old workers leave one by one while new ones with really different bits come: nobody's request fails or changes."""

import signal
from collections.abc import Sequence

import httpx
import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.messages import EndEntry
from blockrelay.protocol.sampling_params import derive_seed
from blockrelay_launcher.drill.from_logs import run_starts
from blockrelay_launcher.drill.report import prompt_rows
from blockrelay_worker.offline.pipeline import Pipeline, generate
from tests.support.systems.system import (
    Golden,
    Job,
    StartSystem,
    System,
    assert_nothing_is_held,
    assert_undisturbed,
    make_jobs,
    start_all,
)
from tests.support.waiting import wait_until

SALT = "new"


def fingerprints(system: System, jobs: Sequence[Job]) -> dict[str, str]:
    """Request -> `system_fingerprint` of its end."""
    found: dict[str, str] = {}
    for job in jobs:
        end = system.log(job.request_id)[1]
        assert isinstance(end, EndEntry)
        found[job.request_id] = end.numerics
    return found


class Judge:
    """What each numerics id computes, alone in this process."""

    def __init__(self, folder: BlockFolder) -> None:
        self._pipelines = {
            salt: Pipeline(folder, stages=1, threads=1, tokens=folder.model.max_position, salt=salt)
            for salt in ("", SALT)
        }

    def tokens(self, job: Job, fingerprint: str) -> list[int]:
        """As the fingerprint says: `a+b@17`."""
        names, *others = fingerprint.split("+")
        parts = [(names, 0), *((name, int(at)) for name, at in (other.split("@") for other in others))]
        tokens: list[int] = []
        for name, at in parts:
            pipeline = self._pipelines[SALT if name.endswith(f"-{SALT}") else ""]
            done = generate(
                pipeline, job.prompt, job.params, seed=derive_seed(job.request_id), tokenizer=None, known=tokens[:at]
            )
            tokens = [*tokens[:at], *done.tokens]
        return tokens


def test_a_rolling_upgrade_fails_nobody(start_system: StartSystem, long_jobs: Golden) -> None:
    first, _ = long_jobs
    system = start_system(
        replicas=2,
        worker={"drain_s": "0.05"},
        scheduler_env={"BLOCKRELAY_NUMERICS_WAIT_S": "1"},
    )
    old = list(system.workers)
    start_all(system, first)
    for _ in old:
        system.start_worker(inject_numerics=SALT)
    system.wait_ready(4)
    second = make_jobs(20, seed=8, vocab=500, tokens=300)
    start_all(system, second)
    old[0].terminate()
    assert old[0].wait(30) == 0
    middle = fingerprints_so_far(system, first)
    assert not any("+" in found for found in middle), "while an old worker lives nobody goes on under the new id"
    more = busy(system, old[1].pid)
    old[1].terminate()
    assert old[1].wait(30) == 0
    third = make_jobs(5, seed=9, vocab=500, tokens=50)
    system.accept_all(third)
    jobs = [*first, *second, *more, *third]
    system.wait_all(jobs)
    results, said = system.results(jobs), fingerprints(system, jobs)
    judge = Judge(system.block_folder)
    assert {job.request_id: judge.tokens(job, said[job.request_id]) for job in jobs} == results
    assert any("+" in found for found in said.values()), "some changed their id on the way"
    assert any(found.endswith(f"-{SALT}") and "+" not in found for found in said.values())
    logs = "".join(log.read_text() for log in system.folder.glob("worker-*.log"))
    assert "DIVERGED" not in logs and "Traceback" not in logs
    assert_nothing_is_held(system)


def busy(system: System, pid: int) -> list[Job]:
    """Send requests until this worker is in the middle of one; all that were sent."""
    (name,) = [w.id for w in system.infos() if w.pid == pid]
    sent: list[Job] = []

    def in_the_middle() -> bool:
        for member in system.client.smembers(system.keys.worker_requests(name)):  # pyright: ignore
            if 5 < int(system.client.hget(system.keys.request(member.decode()), "committed") or 0) < 100:  # pyright: ignore
                return True
        more = make_jobs(2, seed=100 + len(sent), vocab=500, tokens=300)
        system.accept_all(more)
        sent.extend(more)
        return False

    wait_until(in_the_middle, "the old worker is in the middle of a request", timeout_s=60)
    return sent


def fingerprints_so_far(system: System, jobs: Sequence[Job]) -> list[str]:
    found = [system.client.hget(system.keys.request(job.request_id), "numerics") for job in jobs]
    return [value.decode() for value in found if isinstance(value, bytes)]


def test_the_bits_of_the_new_workers_are_others(start_system: StartSystem) -> None:
    """Else the test above could not fail."""
    system = start_system(worker={"inject_numerics": SALT})
    jobs, judge = make_jobs(5, seed=9, vocab=500, tokens=50), Judge(system.block_folder)
    system.accept_all(jobs)
    system.wait_all(jobs)
    assert system.results(jobs) == {job.request_id: judge.tokens(job, f"x-{SALT}") for job in jobs}
    assert all(judge.tokens(job, "x") != judge.tokens(job, f"x-{SALT}") for job in jobs)


def reruns(system: System, jobs: Sequence[Job]) -> int:
    return sum(int(system.client.hget(system.keys.request(job.request_id), "reruns") or 0) for job in jobs)  # pyright: ignore


def test_a_drain_finishes_what_ends_in_time_and_takes_nothing_new(start_system: StartSystem, long_jobs: Golden) -> None:
    jobs, golden = long_jobs
    system = start_system(worker={"drain_s": "120"})
    (leaving,) = system.workers
    start_all(system, jobs)
    (name,) = [w.id for w in system.infos()]
    leaving.terminate()
    wait_until(lambda: any(w.draining for w in system.infos()) or leaving.poll() is not None, "it says that it drains")
    late = make_jobs(1, seed=4, vocab=500)
    system.accept_all(late)
    assert leaving.wait(120) == 0
    assert system.all_ended(jobs) and system.results(jobs) == golden
    assert reruns(system, jobs) == 0 and not system.all_ended(late)
    assert not system.client.exists(system.keys.worker(name))
    system.start_worker()
    system.wait_all(late)
    assert_nothing_is_held(system)


@pytest.mark.parametrize("drain_s", ["120", "0"])
def test_what_is_computed_twice_when_all_workers_are_replaced(
    start_system: StartSystem, long_jobs: Golden, drain_s: str
) -> None:
    """At most one row in a hundred where a drain may take longer than the longest request."""
    jobs, golden = long_jobs
    system = start_system(replicas=2, worker={"drain_s": drain_s})
    for old, some in zip(list(system.workers), (jobs[:10], jobs[10:]), strict=True):
        system.start_worker(drain_s=drain_s)
        system.wait_ready(3)
        start_all(system, some)
        busy = [w.pid for w in system.infos()]
        old.terminate()
        assert old.wait(120) == 0 and old.pid in busy
    assert_undisturbed(system, jobs, golden)
    rows = prompt_rows(run_starts(system.folder))
    share = rows.redone / (rows.needed + sum(map(len, golden.values())))
    print(f"drain of {drain_s} s: {100 * share:.1f} % of the rows were computed twice, {rows.reruns} runs began again")  # noqa: T201
    if drain_s == "0":
        assert share > 0.01 and rows.reruns > 0, "else nothing is seen of a drain"
    else:
        assert share <= 0.01
    assert_nothing_is_held(system)


def test_what_does_not_end_in_time_goes_on_elsewhere(start_system: StartSystem, long_jobs: Golden) -> None:
    jobs, golden = long_jobs
    system = start_system(stages=2, replicas=2, worker={"drain_s": "0.05"})
    start_all(system, jobs)
    pid = system.pid_of(1)
    (leaving,) = [w for w in system.workers if w.pid == pid]
    leaving.terminate()
    assert leaving.wait(30) == 0
    assert reruns(system, jobs) > 0
    assert_undisturbed(system, jobs, golden)


def test_a_second_signal_ends_a_drain_at_once(start_system: StartSystem, long_jobs: Golden) -> None:
    jobs, golden = long_jobs
    system = start_system(worker={"drain_s": "600"})
    start_all(system, jobs)
    (leaving,) = system.workers
    leaving.send_signal(signal.SIGSTOP)  # so that it cannot finish between the two
    leaving.terminate()
    leaving.send_signal(signal.SIGCONT)
    wait_until(lambda: any(w.draining for w in system.infos()), "it drains")
    (info,) = system.infos()
    answer = httpx.get(f"http://{info.host}:{info.port}/readyz")
    assert answer.status_code == 503 and "draining" in answer.json()["reasons"][0]
    leaving.terminate()
    assert leaving.wait(30) == 0
    assert not system.all_ended(jobs) and reruns(system, jobs) > 0
    system.start_worker()
    assert_undisturbed(system, jobs, golden)
