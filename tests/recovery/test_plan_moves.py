"""Another plan moves the blocks of a running system, and its requests go on: no drain, no gap, the same tokens."""

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from blockrelay.protocol.encoding.request_ids import own_id
from tests.support.systems.up_process import UpProcess, planned, run_command, running_up
from tests.support.waiting import wait_until

REQUESTS, TOKENS = 6, 150
SEEDS = range(REQUESTS)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers compute slowly, so that requests still run when the blocks have moved."""
    monkeypatch.setenv("BLOCKRELAY_INJECT_SPEED", "0.01")


def ask(up: UpProcess, seed: int) -> dict[str, Any]:
    return up.complete(prompt=[1, 5 + seed, 9], max_tokens=TOKENS, temperature=1, seed=seed)


def tokens_of(answers: "list[dict[str, Any]]") -> list[list[int]]:
    return [answer["choices"][0]["token_ids"] for answer in answers]


@pytest.fixture(scope="module")
def alone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What an undisturbed system answers."""
    data = tmp_path_factory.mktemp("undisturbed")
    with running_up(tiny_model, "--stages", "2", data=data) as up, ThreadPoolExecutor(REQUESTS) as pool:
        return tokens_of(list(pool.map(lambda seed: ask(up, seed), SEEDS)))


def change_plan(up: UpProcess, *arguments: str) -> str:
    """Give the cell another plan; its stages."""
    done = run_command("plan", *arguments, "--data", up.data, "--json")
    assert done.returncode == 0, done
    return json.loads(done.stdout)["split"]


def served(up: UpProcess) -> list[str]:
    """The stages of every registered worker, in the order of blocks."""
    return sorted(f"{worker['first']}-{worker['last']}" for worker in up.status()["workers"])


def runs(up: UpProcess, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs that an answer's tokens came from."""
    found = httpx.get(f"{up.url}/v1/requests/{own_id(answer['id'])}/provenance", timeout=30)
    assert found.is_success, found.text
    return found.json()["runs"]


@contextmanager
def watched(up: UpProcess) -> Iterator[list[str]]:
    """Collects every reason for which the gateway was not ready meanwhile."""
    over, reasons = threading.Event(), list[str]()

    def look() -> None:
        while not over.wait(0.01):
            answer = httpx.get(f"{up.url}/readyz", timeout=30)
            if not answer.is_success:
                reasons.append(answer.text)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield reasons
    finally:
        over.set()
        thread.join()


@contextmanager
def asked(up: UpProcess) -> "Iterator[list[Future[dict[str, Any]]]]":
    """All requests, under way."""
    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = [pool.submit(ask, up, seed) for seed in SEEDS]
        wait_until(lambda: sum(w["running"] for w in up.status()["workers"]) == 2 * REQUESTS, "both stages have all")
        yield answers


def test_requests_move_to_the_new_stages_while_they_run(
    tiny_model: Path, tmp_path: Path, alone: list[list[int]], slow: None
) -> None:
    uneven = planned(tmp_path / "p.json", "1-1,2-5", tiny_model)
    with running_up(tiny_model, "--stages", "2", data=tmp_path / "d") as up:
        processes = up.pid_of("blockrelay_worker")
        with watched(up) as reasons, asked(up) as answers:
            assert change_plan(up, "apply", str(uneven)) == "1-1,2-5"
            done = [answer.result() for answer in answers]
        assert tokens_of(done) == alone
        assert reasons == [], "some route was complete at every moment"
        moved = [found for answer in done if len(found := runs(up, answer)) > 1]
        assert moved, "nobody was still running when the new stages were there: slow the workers further"
        for found in moved:
            assert [[stage["blocks"] for stage in run["stages"]] for run in found] == [["1-3", "4-5"], ["1-1", "2-5"]]
        wait_until(lambda: served(up) == ["1-1", "2-5"], "the workers of the stages before have left")
        assert up.pid_of("blockrelay_worker") == processes, "in the same processes"


def test_a_worker_that_dies_while_it_moves_takes_nothing_with_it(
    tiny_model: Path, tmp_path: Path, alone: list[list[int]], slow: None
) -> None:
    uneven = planned(tmp_path / "p.json", "1-1,2-5", tiny_model)
    with running_up(tiny_model, "--stages", "2", data=tmp_path / "d") as up:
        with asked(up) as answers, ThreadPoolExecutor(1) as operator:
            change = operator.submit(change_plan, up, "apply", str(uneven))
            os.kill(up.pid_of_successor(), signal.SIGKILL)
            assert change.result() == "1-1,2-5"
            assert tokens_of([answer.result() for answer in answers]) == alone
        wait_until(lambda: served(up) == ["1-1", "2-5"] and not up.status()["missing"], "all is there again")


def test_a_plan_that_is_taken_back_at_once_leaves_the_stages_of_before(
    tiny_model: Path, tmp_path: Path, alone: list[list[int]], slow: None
) -> None:
    uneven = planned(tmp_path / "p.json", "1-1,2-5", tiny_model)
    with running_up(tiny_model, "--stages", "2", data=tmp_path / "d") as up:
        with watched(up) as reasons, asked(up) as answers:
            change_plan(up, "apply", str(uneven))
            assert change_plan(up, "rollback") == "1-3,4-5"
            assert tokens_of([answer.result() for answer in answers]) == alone
        assert reasons == []
        wait_until(lambda: served(up) == ["1-3", "4-5"], "one worker for each stage")
        assert tokens_of([ask(up, 0)]) == alone[:1]


def test_a_system_that_ends_while_blocks_move_ends_in_time(tiny_model: Path, tmp_path: Path, slow: None) -> None:
    uneven = planned(tmp_path / "p.json", "1-1,2-5", tiny_model)
    with running_up(tiny_model, "--stages", "2", data=tmp_path / "d") as up:
        change_plan(up, "apply", str(uneven))
        assert up.stop() == 0


def test_moves_leave_nothing_of_the_stages_before(tiny_model: Path, tmp_path: Path) -> None:
    """The memory of an engine that has left is free again, its KV pages and its files included."""
    uneven = planned(tmp_path / "p.json", "1-1,2-5", tiny_model)
    with running_up(tiny_model, "--stages", "2", data=tmp_path / "d") as up:
        for _ in range(3):
            change_plan(up, "apply", str(uneven))
            wait_until(lambda: served(up) == ["1-1", "2-5"], "the stages of one plan")
            change_plan(up, "rollback")
            wait_until(lambda: served(up) == ["1-3", "4-5"], "the stages of the other")
        for pid in up.pid_of("blockrelay_worker"):
            maps = Path(f"/proc/{pid}/maps")
            wait_until(lambda maps=maps: maps.read_text().count("rotary.bin") <= 1, f"one engine is left in {pid}")


def test_a_stage_that_cannot_be_loaded_beside_the_present_one(tiny_model: Path, tmp_path: Path, slow: None) -> None:
    """The worker says so, leaves first, and loads again; what was accepted waits for that."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    uneven = planned(tmp_path / "p.json", "1-1,2-5", model)
    block = model / "blocks" / "block_2.bin"
    with running_up(model, "--stages", "2", data=tmp_path / "d") as up:
        before = tokens_of([ask(up, 0)])
        sound = block.read_bytes()
        block.write_bytes(bytes(len(sound)))
        change_plan(up, "apply", str(uneven))
        logs = tmp_path / "d" / "logs"

        def said() -> str:
            return "".join(file.read_text() for file in logs.glob("worker*.log"))

        wait_until(lambda: "STAGE_NOT_LOADED_BESIDE" in said(), "it was tried")
        block.write_bytes(sound)
        assert tokens_of([ask(up, 0)]) == before
        wait_until(lambda: served(up) == ["1-1", "2-5"] and not up.status()["missing"], "all is there")
        assert "report this" not in said()
