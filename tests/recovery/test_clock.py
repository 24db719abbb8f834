"""The clock of the host of Redis is set an hour forwards or back: it dates beats and deadlines, never a token."""

import os
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.systems.system import Golden, StartSystem, assert_undisturbed, make_jobs, serve, start_all
from tests.support.waiting import wait_until

HOUR = 3600
#: The first eight bytes of the file that CLOCK_OFFSET names are seconds to be added to the time.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *offset;

__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("CLOCK_OFFSET"), O_RDONLY);
    void *at = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    if (file < 0 || at == MAP_FAILED) abort();
    offset = at;
    close(file);
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = (int (*)(struct timeval *, void *))dlsym(RTLD_NEXT, "gettimeofday");
    int answer = real(now, zone);
    if (offset) now->tv_sec += *offset;
    return answer;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int answer = real(clock, now);
    if (offset && clock == CLOCK_REALTIME) now->tv_sec += *offset;
    return answer;
}

time_t time(time_t *at) {
    struct timeval now;
    gettimeofday(&now, 0);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""
SetClock = Callable[[int], None]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    library = folder / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "shim.c", "-ldl"], check=True)
    return library


@pytest.fixture
def clock(shim: Path, tmp_path: Path) -> Iterator[tuple[dict[str, str], SetClock]]:
    """The environment of a Redis whose clock is what the function last said, in seconds from the true time."""
    file = tmp_path / "offset"
    file.write_bytes(struct.pack("q", 0))

    def set_clock(seconds: int) -> None:
        with file.open("r+b") as opened:
            opened.write(struct.pack("q", seconds))

    yield {"LD_PRELOAD": str(shim), "CLOCK_OFFSET": str(file)}, set_clock


@pytest.mark.parametrize(
    "seconds",
    [pytest.param(HOUR, id="forwards"), pytest.param(-HOUR, id="back", marks=pytest.mark.faults)],
)
def test_a_clock_that_is_set_anew_loses_nothing(
    start_system: StartSystem, long_jobs: Golden, clock: tuple[dict[str, str], SetClock], seconds: int
) -> None:
    environment, set_clock = clock
    jobs, golden = long_jobs
    system = start_system(stages=2, redis_env=environment, scheduler_env={"BLOCKRELAY_DEAD_AFTER_S": "1"})
    ids = {w.id for w in system.infos()}
    before = system.client.time()[0]  # pyright: ignore
    start_all(system, jobs)
    set_clock(seconds)
    assert abs(system.client.time()[0] - before - seconds) < HOUR / 2  # pyright: ignore
    assert_undisturbed(system, jobs, golden)
    more = make_jobs(4, seed=41, vocab=500)
    serve(system, more)
    assert {w.id for w in system.infos()} == ids, "nobody was declared dead for it"


def test_a_worker_that_died_before_the_clock_was_put_back_is_found_dead(
    start_system: StartSystem, long_jobs: Golden, clock: tuple[dict[str, str], SetClock]
) -> None:
    """Its last beat lies in the future for an hour."""
    environment, set_clock = clock
    jobs, golden = long_jobs
    system = start_system(stages=2, redis_env=environment, scheduler_env={"BLOCKRELAY_DEAD_AFTER_S": "1"})
    start_all(system, jobs)
    victim = system.pid_of(0)
    os.kill(victim, signal.SIGKILL)
    set_clock(-HOUR)
    wait_until(lambda: all(w.pid != victim for w in system.infos()), "it is declared dead")
    system.start_worker()
    assert_undisturbed(system, jobs, golden)


@pytest.mark.faults
def test_a_stalled_request_is_found_although_it_moved_in_the_future(
    start_system: StartSystem, clock: tuple[dict[str, str], SetClock]
) -> None:
    """The one worker of its stage is frozen and looks alive for ever: only the request's own clock can tell."""
    environment, set_clock = clock
    patient = {
        "BLOCKRELAY_DEAD_AFTER_S": "60",
        "BLOCKRELAY_STALLED_AFTER_S": "1",
        "BLOCKRELAY_PROMPT_TOKENS_PER_S": "100000",
    }
    system = start_system(stages=2, redis_env=environment, scheduler_env=patient)
    (job,) = make_jobs(1, seed=43, vocab=500, tokens=300)
    system.accept(job)
    wait_until(lambda: system.tokens_so_far([job]) > 10, "it runs")
    frozen = system.pid_of(1)
    os.kill(frozen, signal.SIGSTOP)
    set_clock(-HOUR)
    wait_until(lambda: system.client.hget(system.keys.request(job.request_id), "reruns"), "it is run again")
    os.kill(frozen, signal.SIGCONT)
    assert_undisturbed(system, [job])
