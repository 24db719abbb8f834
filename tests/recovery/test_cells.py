"""Two cells behind three gateways: keys are sent again while the list of cells changes, and one cell dies whole."""

import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from blockrelay.protocol.encoding.request_ids import RequestId, parse_id
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_launcher.client.resuming import resuming_stream
from tests.support.systems.cell_file import CellFile
from tests.support.systems.system import Job, StartSystem, System, golden_tokens
from tests.support.waiting import wait_until

PATH = "/v1/completions"
PARAMS = SamplingParams(max_tokens=24, temperature=0.8, ignore_eos=True)
NAMES = ("c0", "c1")


class Cells:
    """Two whole systems, three gateways that serve both, and the list that they read."""

    def __init__(self, folder: Path, start_system: StartSystem) -> None:
        self.systems: dict[str, System] = {name: start_system(cell=name) for name in NAMES}
        self.file = CellFile(folder / "cells.json", {name: one.control.url for name, one in self.systems.items()})
        # Rows between stages and pages, too, are each cell's own: here they are in its control Redis.
        self.file.put(c0=1, c1=0)
        first = self.systems["c0"]
        started = [first.start_gateway(cells=str(self.file.path)) for _ in range(3)]
        self.gateways = [url for url, _ in started]

    def ask(self, key: str, gateways: Sequence[str]) -> tuple[str, list[int]]:
        """The id of a request with this key, and its tokens."""
        tokens: list[int] = []
        request_id = ""
        for event in resuming_stream(gateways, PATH, body(key), key=key):
            request_id = event.id.partition(":")[0]
            for choice in event.data["choices"]:
                tokens += choice["token_ids"]
        return request_id, tokens

    def accepted(self) -> int:
        """All requests that ever were, in both cells."""
        books = (one.client.hget(one.keys.totals(one.model_key), "accepted") for one in self.systems.values())
        return sum(int(count or 0) for count in books)  # pyright: ignore

    def wait_for_list(self) -> None:
        """Until all gateways have read the last list."""
        logs = list(self.systems["c0"].folder.glob("gateway-*.log"))
        wait_until(
            lambda: all(f'"version": {self.file.version}' in path.read_text() for path in logs), "all have the list"
        )


def body(key: str) -> dict[str, Any]:
    prompt = [5 + sum(key.encode()) % 50, 7, 9]
    return {"prompt": prompt, "max_tokens": 24, "temperature": 0.8, "ignore_eos": True, "return_token_ids": True}


def named(request_id: str) -> RequestId:
    found = parse_id(request_id)
    assert found is not None, request_id
    return found


@pytest.fixture
def cells(tmp_path: Path, start_system: StartSystem) -> Cells:
    return Cells(tmp_path, start_system)


def test_a_key_is_one_request_while_the_list_changes(cells: Cells) -> None:
    """Each is asked for twice at the same time, by two clients at any gateways, before, while and after it changes."""
    keys = [f"key-{i}" for i in range(30)]
    with ThreadPoolExecutor(12) as pool:
        asked = {key: [pool.submit(cells.ask, key, cells.gateways)] for key in keys}
        for c0, c1 in ((1, 1), (0, 1), (1, 0), (1, 3)):
            cells.file.put(c0=c0, c1=c1)
            for key in keys:
                asked[key].append(pool.submit(cells.ask, key, cells.gateways))
            asked[keys[0]][-1].result()
        # All of these may have come before anybody had read another list; the next ones cannot.
        cells.wait_for_list()
        later = [f"later-{i}" for i in range(10)]
        asked |= {key: [pool.submit(cells.ask, key, cells.gateways) for _ in range(2)] for key in later}
        keys += later
        answers = {key: {(name, *tokens) for name, tokens in (one.result() for one in asked[key])} for key in keys}
    assert all(len(found) == 1 for found in answers.values()), "one key is one request, in one cell"
    assert cells.accepted() == len(keys)
    jobs: list[Job] = []
    for key, (found,) in answers.items():
        jobs.append(Job(request_id=named(found[0]).request_id, prompt=tuple(body(key)["prompt"]), params=PARAMS))
    golden = golden_tokens(cells.systems["c0"].block_folder, jobs)
    for ((request_id, *tokens),) in answers.values():
        assert tokens == golden[named(request_id).request_id], "each is its solo run"
    assert {named(request_id).cell for ((request_id, *_),) in answers.values()} == set(NAMES)


def test_a_cell_that_dies_whole_takes_no_other_with_it(cells: Cells) -> None:
    """Its requests are 503 until it is back, with what it had; those of the other, and new ones, do not notice."""
    cells.file.put(c0=1, c1=1)
    cells.wait_for_list()
    keys = [f"key-{i}" for i in range(16)]
    before = {key: cells.ask(key, cells.gateways) for key in keys}
    dead = {key for key, (request_id, _) in before.items() if named(request_id).cell == "c1"}
    assert 0 < len(dead) < len(keys)
    system = cells.systems["c1"]
    system.control.kill()
    for process in (*system.workers, *system.schedulers):
        process.send_signal(signal.SIGKILL)
        process.wait()
    with ExitStack() as stack:
        gateways = [stack.enter_context(httpx.Client(base_url=url, timeout=30)) for url in cells.gateways]
        for index, key in enumerate(keys):
            answer = gateways[index % 3].post(PATH, json=body(key), headers={"Idempotency-Key": key})
            assert answer.status_code == (503 if key in dead else 200), answer.text
        for index in range(12):
            answer = gateways[index % 3].post(PATH, json=body("new"))
            assert answer.status_code == 200 and named(answer.json()["id"]).cell == "c0"
        request_id = before[next(iter(dead))][0]
        assert gateways[0].get(f"/v1/requests/{request_id}").status_code == 503
        assert gateways[0].get("/readyz").status_code == 200
        system.control.start()
        system.start_scheduler()
        system.start_worker()
        system.wait_ready(1)
    for key in keys:
        assert cells.ask(key, cells.gateways) == before[key], "what was accepted is there again"
    assert {named(cells.ask(f"later-{i}", cells.gateways)[0]).cell for i in range(16)} == set(NAMES)
