"""What `blockrelay analyse --sizing` says of Redis and its disk, beside what a real small system does."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest

from bench.scenarios.capacity import counters
from blockrelay.redis.client import connect
from blockrelay_converter.sizing import measured
from blockrelay_converter.sizing.capacity import ExpectedLoad, a_second
from blockrelay_converter.sizing.measured import Cost
from tests.support.models.tiny_model import write_tiny_model
from tests.support.systems.up_process import UpProcess, running_up

#: Of commands and bytes: prompts of another vocabulary, another machine and another batch change them by less.
FACTOR = 2.0
PROMPT, CONTEXT = 40, 512
COSTS = {"commands": measured.REDIS_COMMANDS, "aof": measured.FILE_BYTES, "wire": measured.REDIS_WIRE}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    model = write_tiny_model(tmp_path_factory.mktemp("tiny"), context=CONTEXT)
    with running_up(model, "--no-speculation", data=tmp_path_factory.mktemp("data")) as process:
        yield process


@dataclass(frozen=True, slots=True)
class Grown:
    """How long a load took, and by how much each counter grew."""

    seconds: float
    counters: dict[str, float]


def grown(up: UpProcess, work: Callable[[], None]) -> Grown:
    with connect(up.redis_urls()[0]) as control:
        before, began = counters(control), time.monotonic()
        work()
        now = counters(control)
        return Grown(time.monotonic() - began, {name: now[name] - before[name] for name in now})


def ask(up: UpProcess, number: int, new: int) -> None:
    prompt = [3 + (7 * number + position) % 500 for position in range(PROMPT)]
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
    with httpx.stream("POST", f"{up.url}/v1/completions", json={**fields, "stream": True}, timeout=60) as answer:
        assert answer.status_code == 200
        assert answer.read().endswith(b"data: [DONE]\n\n")


# Where a step is faster than the disk, a COMMIT has the tokens of several: how many it was is counted.
@pytest.mark.parametrize(("clients", "requests", "new"), [(1, 30, 4), (1, 4, 200), (8, 48, 60)])
def test_redis_and_its_disk_do_what_sizing_says(up: UpProcess, clients: int, requests: int, new: int) -> None:
    def work() -> None:
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(lambda number: ask(up, number, new), range(requests)))

    ask(up, 0, 2)  # what is there once is there
    found = grown(up, work)
    load = ExpectedLoad(requests_per_second=requests / found.seconds, prompt=PROMPT, new=new, context=CONTEXT)
    commits = (found.counters["scripts"] - 2 * requests) / found.seconds  # beside ACCEPT and CLAIM
    said = {name: found.seconds * a_second(cost, load, commits) for name, cost in COSTS.items()}
    ratios = {name: round(said[name] / found.counters[name], 2) for name in COSTS}
    assert all(1 / FACTOR < ratio < FACTOR for ratio in ratios.values()), f"said / found: {ratios}"


def test_a_cost_that_is_wrong_would_be_seen(up: UpProcess) -> None:
    """The comparison above has teeth: the bytes of a token alone are no cost of a request."""

    def work() -> None:
        for number in range(10):
            ask(up, number, 4)

    found = grown(up, work)
    load = ExpectedLoad(requests_per_second=10 / found.seconds, prompt=PROMPT, new=4, context=CONTEXT)
    without = Cost(source="capacity", token=measured.FILE_BYTES.token)
    assert found.seconds * a_second(without, load, 0.0) * FACTOR < found.counters["aof"]
