"""Pages of preempted runs wait in the page store, and come back when the run goes on."""

from pathlib import Path

import pytest

from blockrelay_worker.runs.run import Run
from tests.support.worker.stored_pages import LAYOUT, PROMPT, SHAPE, Worker, numbers, working


def reused(worker: Worker) -> None:
    """Other requests have used all pages of the pool meanwhile."""
    assert worker.store.flush(10)
    worker.pool.free(worker.pool.allocate(worker.pool.free_pages))


def goes_on_from(worker: Worker, run: Run, tokens: int) -> None:
    """The run gets this many tokens back, and computes the rest of PROMPT."""
    worker.table.attach_prefix(run)
    worker.loaded()
    assert run.computed == tokens
    worker.compute(run)
    assert worker.content(run, len(PROMPT)) == numbers(len(PROMPT))


@pytest.mark.parametrize("swaps", [False, True], ids=["in memory", "on the disk alone"])
def test_a_preempted_run_gets_its_pages_back(tmp_path: Path, swaps: bool) -> None:
    folder = tmp_path / "swap"
    with working(tmp_path / "shm", swap=folder if swaps else None) as worker:
        run = worker.run(PROMPT)
        worker.compute(run)
        assert not swaps or list(folder.iterdir()) == [], "only preempted runs are written to the disk"
        worker.table.preempt(run)
        reused(worker)
        worker.table.attach_prefix(run)
        worker.loaded()
        assert (run.computed, run.kv.cached, run.kv.held) == (64, 0, 0)
        assert worker.content(run, 64) == numbers(64)
        size = 4 * LAYOUT.layers * SHAPE.record_bytes
        for direction in ("out", "in"):
            assert worker.value("swapped_pages", direction=direction) == 4
            assert worker.value("swapped_bytes", direction=direction) == size
            assert worker.value("swap_seconds", direction=direction) > 0
        assert worker.store.flush(10)
        assert not swaps or list(folder.iterdir()) == [], "what came back leaves the disk"


@pytest.mark.parametrize("end", ["dropped", "found in the pool"])
def test_pages_leave_the_disk_when_their_run_ends_or_does_not_need_them(tmp_path: Path, end: str) -> None:
    with working(tmp_path, swap=tmp_path / "swap") as worker:
        run = worker.run(PROMPT)
        worker.compute(run)
        worker.table.preempt(run)
        assert worker.store.flush(10)
        files = list((tmp_path / "swap").iterdir())
        assert len(files) == 4 and {path.stat().st_mode & 0o777 for path in files} == {0o600}
        if end == "dropped":
            worker.table.drop(run.request_id, run.run_id)
        else:
            worker.table.attach_prefix(run)
            assert run.computed == 64 and not run.kv.loading
        assert worker.store.flush(10)
        assert list((tmp_path / "swap").iterdir()) == []


@pytest.mark.parametrize("damage", ["flip", "of another page", "gone"])
def test_a_damaged_page_on_the_disk_is_computed_again(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "swap"
    with working(tmp_path, swap=folder) as worker:
        run = worker.run(PROMPT)
        worker.compute(run)
        worker.table.preempt(run)
        reused(worker)
        third, fourth = (folder / f"{run.kv.hashes[index].hex()}.1-3" for index in (2, 3))
        match damage:
            case "flip":
                data = bytearray(third.read_bytes())
                data[-1] ^= 1
                third.write_bytes(data)
            case "of another page":
                third.write_bytes(fourth.read_bytes())
            case _:
                third.unlink()
        goes_on_from(worker, run, 32)


def test_a_full_disk_keeps_the_beginning_and_the_rest_is_computed_again(tmp_path: Path) -> None:
    with working(tmp_path, swap=tmp_path / "swap", swapped_pages=2) as worker:
        run = worker.run(PROMPT)
        worker.compute(run)
        worker.table.preempt(run)
        reused(worker)
        assert worker.trouble == ["full", "full"] and worker.value("swapped_pages", direction="out") == 2
        goes_on_from(worker, run, 32)


def test_a_new_request_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    with working(tmp_path, swap=tmp_path / "swap") as worker:
        run = worker.run(PROMPT)
        worker.compute(run)
        worker.table.preempt(run)
        reused(worker)
        assert not worker.run(PROMPT).kv.loading
        again = worker.run(PROMPT, reruns=1)
        worker.loaded()
        assert again.computed == 64, "a request that runs again on another worker finds them"


def test_a_waiting_run_that_ends_for_another_one_leaves_it_its_pages(tmp_path: Path) -> None:
    """The worker drains, for example, while the run waits for pages of the pool."""
    with working(tmp_path, swap=tmp_path / "swap") as worker:
        run = worker.run(PROMPT)
        worker.compute(run)
        worker.table.preempt(run)
        worker.table.drop(run.request_id, run.run_id, again=True)
        reused(worker)
        again = worker.run(PROMPT, reruns=1)
        worker.loaded()
        assert again.computed == 64
