"""The two threads between pool and tiers, with real tiers on both sides of a crash."""

import queue
from pathlib import Path
from typing import Any

import pytest

from blockrelay_worker.kv.block_hashes import extend_hashes, root_hash
from blockrelay_worker.kv.store.store import Fresh
from blockrelay_worker.kv.store.tier import Tier
from tests.support.worker.runs import new_run
from tests.support.worker.stored_pages import LAYOUT, PROMPT, SHAPE, numbers, working


def filled(folder: Path) -> None:
    """A worker computed the prompt and has gone."""
    with working(folder) as worker:
        worker.compute(worker.run(PROMPT))
        assert worker.store.flush(10)


def test_the_next_worker_finds_what_the_last_one_computed(tmp_path: Path) -> None:
    filled(tmp_path)
    with working(tmp_path) as worker:
        run = worker.run(PROMPT)
        assert run.kv.loading is not None and run.missing == 0
        worker.loaded()
        assert (run.computed, run.kv.cached, run.missing) == (64, 64, 6)
        assert worker.content(run, 64) == [[t + x for layer in range(3) for x in (0, layer)] for t in range(64)]
        assert worker.value("page_store_hits", tier="shm") == 4
        assert worker.value("prefix_cache_hits") == 64
        again = worker.run(PROMPT)
        assert again.pages == run.pages[:4] and not again.kv.loading, "now the pool has them"


def test_what_the_pool_has_is_not_loaded(tmp_path: Path) -> None:
    filled(tmp_path)
    with working(tmp_path) as worker:
        worker.compute(worker.run(PROMPT[:40], skip_prefix_cache=True))
        run = worker.found()
        assert worker.value("page_store_hits", tier="shm") == 2
        assert run.computed == 64


@pytest.mark.parametrize("damage", ["flip", "cut", "swap", "remove"])
def test_pages_that_are_not_what_they_should_be_are_computed_again(tmp_path: Path, damage: str) -> None:
    filled(tmp_path)
    names: list[bytes] = []
    extend_hashes(names, root_hash(salt="", model_hash="m", numerics="n"), PROMPT, 4)
    files = [tmp_path / f"{name.hex()}.1-3" for name in names]
    third = files[2]
    match damage:
        case "flip":
            data = bytearray(third.read_bytes())
            data[SHAPE.record_bytes + 200] ^= 4
            third.write_bytes(data)
        case "cut":
            third.write_bytes(third.read_bytes()[:-1])
        case "swap":
            third.write_bytes(files[1].read_bytes())
        case _:
            third.unlink()
    with working(tmp_path) as worker:
        run = worker.found()
        assert (run.computed, len(run.pages)) == (32, 2)
        corrupt = worker.value("page_store_trouble", tier="shm", kind="corrupt")
        assert corrupt == (damage != "remove")
        worker.compute(run)
        assert worker.store.flush(10)
    with working(tmp_path) as worker:
        assert worker.found().computed == 64, "the damage is repaired by who computed the page"


def test_fewer_free_pages_than_known_pages_are_filled_as_far_as_they_go(tmp_path: Path) -> None:
    filled(tmp_path)
    with working(tmp_path, pages=3) as worker:
        assert worker.found().computed == 48


class Held:
    """A tier whose answers wait until the test says so."""

    label = "shm"

    def __init__(self, tier: Tier, go: "queue.SimpleQueue[None]") -> None:
        self._tier, self._go = tier, go

    def get(self, names: Any, blocks: range) -> Any:
        self._go.get(timeout=10)
        return self._tier.get(names, blocks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)


@pytest.mark.parametrize("how", ["dropped", "preempted", "cleared"])
def test_pages_of_a_run_that_goes_while_they_are_loaded_come_back_afterwards(tmp_path: Path, how: str) -> None:
    filled(tmp_path)
    go: queue.SimpleQueue[None] = queue.SimpleQueue()
    with working(tmp_path, slow=lambda tier: Held(tier, go)) as worker:
        run = worker.run(PROMPT)
        match how:
            case "dropped":
                worker.table.drop(run.request_id, run.run_id)
            case "preempted":
                worker.table.preempt(run)
            case _:
                go.put(None)
                worker.table.clear()
                assert worker.pool.used_pages == 0, "clear waits for the reader"
                worker.loaded()
                worker.table.check_integrity()
                return
        assert worker.pool.used_pages == 4, "somebody may still write into them"
        worker.table.check_integrity()
        go.put(None)
        worker.loaded()
        assert worker.pool.used_pages == 0 and not run.kv.loading
        worker.table.check_integrity()


def test_a_page_that_changed_hands_before_it_was_written_is_not_written(tmp_path: Path) -> None:
    with working(tmp_path) as worker:
        (page,) = worker.pool.allocate(1)
        assert worker.pool.publish(page, bytes(32))
        fresh = Fresh(bytes(32), page, worker.pool.generations[page])
        room = memoryview(bytearray(LAYOUT.layers * SHAPE.record_bytes))
        assert worker.store.copied([fresh], [room])
        worker.pool.free([page])
        assert worker.store.copied([fresh], [room]), "it is cached, and still what its name says"
        taken = worker.pool.allocate(worker.pool.pages)
        assert worker.store.copied([fresh], [room]) == []
        worker.pool.free(taken)
        assert worker.value("page_store_dropped") == 1


# --- pages that are begun: a private run leaves them to the next one of its request ---


def test_who_goes_on_with_a_private_request_has_its_rows_to_the_last(tmp_path: Path) -> None:
    """The device has no room for the row behind token 70; a stand-in computes that row and no other."""
    with working(tmp_path) as device:
        run = device.run(PROMPT, request_id="r", private=True)
        device.compute(run)
        device.table.export(run, 10)
        device.table.drop("r", "r")
    with working(tmp_path) as stand_in:
        run = stand_in.run([*PROMPT, 70], request_id="r", private=True, limit=70)
        stand_in.loaded()
        assert (run.computed, run.kv.cached, run.kv.published, run.missing) == (70, 70, 4, 1)
        assert stand_in.content(run, 70) == numbers(70)
        run.learn(list(range(71, 81)))
        stand_in.compute(run)
        assert stand_in.content(run, 81) == numbers(81) and run.kv.published == 5, "its page goes on"


def test_a_worker_that_stays_in_the_route_has_kept_them_itself(tmp_path: Path) -> None:
    """Also if it had come further than the stage that failed, and for a stage that learns tokens with rows."""
    with working(tmp_path) as worker:
        run = worker.run([*PROMPT, 70], request_id="r", private=True)
        worker.compute(run)
        (page,) = run.pages[4:]
        again = worker.run([*PROMPT, 70], request_id="r", private=True, limit=68)
        assert (again.computed, again.pages[4:], again.missing) == (68, [page], 3)
        assert not worker.pool.is_published(page), "its own, to be written"
        worker.compute(again)
        worker.table.drop("r", "r")
        later = new_run("r", [*PROMPT, 70], first=False, private=True)
        worker.table.add(later)
        worker.table.attach_prefix(later, exactly=71)
        assert later.computed == 71 and worker.content(later, 71) == numbers(71)


def test_of_a_page_that_was_filled_meanwhile_the_store_has_the_beginning(tmp_path: Path) -> None:
    with working(tmp_path) as worker:
        run = worker.run(PROMPT, request_id="r", private=True)
        worker.compute(run)
        worker.store.flush(10)
        again = worker.run(PROMPT, request_id="r", private=True, limit=37)
        if again.kv.loading:
            worker.loaded()
        assert again.computed == 37 and worker.content(again, 37) == numbers(37)
        assert not worker.pool.is_published(again.pages[2])


@pytest.mark.parametrize(
    "other",
    [{"request_id": "s"}, {"private": False}, {"limit": None}, {"limit": 64}, {"prompt": [*PROMPT[:69], 5, 70]}],
    ids=["another request", "shared", "nobody said so", "so many", "other tokens"],
)
def test_nobody_else_gets_a_page_that_is_begun(tmp_path: Path, other: dict[str, Any]) -> None:
    with working(tmp_path) as worker:
        run = worker.run(PROMPT, request_id="r", private=True)
        worker.compute(run)
        worker.table.export(run, 10)
        worker.table.drop("r", "r")
        asked: dict[str, Any] = {"prompt": [*PROMPT, 70], "request_id": "r", "private": True, "limit": 70} | other
        found = worker.run(**asked)
        if found.kv.loading:
            worker.loaded()
        assert found.computed % 16 == 0 and found.computed <= 64


def test_a_page_that_is_begun_and_gone_costs_its_rows(tmp_path: Path) -> None:
    with working(tmp_path) as worker:
        run = worker.run(PROMPT, request_id="r", private=True)
        worker.compute(run)
        assert worker.store.flush(10)
        worker.table.drop("r", "r")
        worker.pool.free(worker.pool.allocate(worker.pool.free_pages))
        again = worker.run([*PROMPT, 70], request_id="r", private=True, limit=70)
        if again.kv.loading:
            worker.loaded()
        assert again.computed == 64


def test_pages_that_turn_out_to_be_wrong_are_found_nowhere(tmp_path: Path) -> None:
    """Behind the first 40 tokens: two pages stay, and the next worker computes and keeps the others anew."""
    with working(tmp_path) as worker:
        run = worker.run(PROMPT)
        worker.compute(run)
        worker.table.distrust(run, 40)
        assert (run.computed, run.kv.published) == (40, 2)
        beside = worker.run(PROMPT)
        assert (beside.computed, beside.kv.loading) == (32, None) or beside.kv.loading is not None
        worker.table.drop(beside.request_id, beside.run_id)
        assert worker.store.flush(10)
    with working(tmp_path) as worker:
        run = worker.found()
        assert run.computed == 32
        worker.compute(run)
        assert worker.store.flush(10)
    with working(tmp_path) as worker:
        assert worker.found().computed == 64
