"""The first stage's batches: groups that keep several stages busy, guesses, and pages that run out."""

from collections.abc import Sequence

import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_worker.runs.run import Run
from blockrelay_worker.scheduling.step_cost import StepCost
from blockrelay_worker.scheduling.work import Work
from tests.support.cell import Cell
from tests.support.worker.first_stage import Stage

#: One more row costs nothing up to 32 of them.
FREE_ROWS = StepCost(
    decode_s=0.01, prompt_token_s=0.001, by_tokens=dict.fromkeys((1, 2, 3, 4, 6, 8, 12, 16, 24, 32), 0.01)
)


@pytest.fixture
def pipeline(w8a8: BlockFolder, cell: Cell) -> Stage:
    return Stage(w8a8, cell, last=2)


@pytest.fixture
def alone(w8a8: BlockFolder, cell: Cell) -> Stage:
    return Stage(w8a8, cell, last=5, pages=6)


def names(work: list[Work]) -> set[str]:
    return {item.run.request_id for item in work}


def test_decode_rows_are_split_into_groups_that_stay_balanced(pipeline: Stage) -> None:
    runs = {n: pipeline.run(n, [5, 6, 7], computed=2) for n in "pqrstu"}
    first, second = pipeline.step(), pipeline.step()
    assert names(first) | names(second) == set(runs) and len(first) == len(second) == 3
    assert pipeline.step() == [], "all of them are on their way"
    for n in runs:  # all tokens come back at once: still no group of six
        runs[n].learn([8])
    assert len(pipeline.step()) == 3


def test_stages_that_share_their_cores_get_the_whole_batch(w8a8: BlockFolder, cell: Cell) -> None:
    stage = Stage(w8a8, cell, last=2)
    for worker_id in stage.route:
        cell.client.hset(cell.keys.worker(worker_id), "threads", 2)
    for n in "pqrstu":
        stage.run(n, [5, 6, 7], computed=2)
    assert len(stage.step()) == 6


def test_guesses_stand_behind_the_last_known_token_and_what_was_right_is_not_computed_again(pipeline: Stage) -> None:
    run = pipeline.run("p", [1, 2, 3, 1, 2], computed=4)
    (work,) = pipeline.step(FREE_ROWS)
    assert list(work.tokens) == [2, 3, 1] and work.drafts == 2 and work.known_end == 5
    assert run.first is not None
    run.first.drafts = (3, 1)
    run.learn([3, 9])
    assert run.tokens[5:] == [3, 9] and run.computed == 6, "the row of 3 was right, that of 1 was not"


def test_nobody_is_guessed_for_beside_a_prompt_nor_in_a_tensor_step(pipeline: Stage) -> None:
    pipeline.run("p", [1, 2, 3, 1, 2], computed=4)
    pipeline.run("tensors", [1, 2, 3, 1, 2], computed=4, logits="last")
    prompt = pipeline.run("long", [7] * 40, computed=0)
    assert all(item.drafts == 0 for item in pipeline.step(FREE_ROWS))
    assert prompt.computed > 0
    pipeline.table.drop("long", "long")
    pipeline.table.get("tensors", "tensors").learn([3])  # pyright: ignore[reportOptionalMemberAccess]
    assert [item.drafts for item in pipeline.step(FREE_ROWS) if item.run.request_id == "tensors"] == [0]


class Nines:
    """A guesser that always guesses the token 9, and notes what it was asked."""

    def __init__(self, count: int) -> None:
        self.given = count
        self.asked: list[dict[str, int]] = []
        self.interrupts = 0

    def look(self, runs: Sequence[Run]) -> None:
        pass

    def count(self, runs: Sequence[Run], cost: StepCost) -> int:
        return self.given

    def guess(self, asked: Sequence[tuple[Run, int]]) -> list[list[int]]:
        self.asked.append({run.request_id: limit for run, limit in asked})
        return [[9] * limit for _, limit in asked]

    def interrupt(self) -> None:
        self.interrupts += 1

    def close(self) -> None:
        pass


def test_a_draft_model_is_asked_only_where_look_up_finds_nothing(w8a8: BlockFolder, cell: Cell) -> None:
    nines = Nines(3)
    stage = Stage(w8a8, cell, last=5, guesser=nines)
    repeats = stage.run("repeats", [1, 2, 3, 1, 2], computed=4)
    stage.run("plain", [5, 6, 7], computed=2)
    stage.run("short", [5, 6, 8], computed=2, params=SamplingParams(max_tokens=2, temperature=0))
    stage.run("tensors", [5, 6, 9], computed=2, logits="last")
    work = {item.run.request_id: item for item in stage.step(FREE_ROWS)}
    assert nines.asked == [{"plain": 3, "short": 1}]
    assert list(work["repeats"].tokens) == [2, 3, 1] and repeats.first is not None and repeats.first.by_look_up
    assert list(work["plain"].tokens) == [7, 9, 9, 9] and work["plain"].drafts == 3 and work["plain"].known_end == 3
    assert work["plain"].run.first is not None and not work["plain"].run.first.by_look_up
    assert list(work["short"].tokens) == [8, 9] and work["tensors"].drafts == 0


def test_a_draft_model_guesses_within_pages_and_rows_and_not_beside_prompts(w8a8: BlockFolder, cell: Cell) -> None:
    nines = Nines(8)
    stage = Stage(w8a8, cell, last=5, pages=3, guesser=nines)
    stage.run("full", [5] * 15 + [6], computed=15)
    stage.run("free", [7, 8], computed=1)
    stage.table.pool.allocate(1)
    assert {item.run.request_id: item.drafts for item in stage.step()} == {"full": 0, "free": 8}
    stage = Stage(w8a8, cell, last=5, guesser=nines)
    stage.run("decodes", [5, 6], computed=1)
    stage.run("prompt", [7] * 40, computed=0)
    assert all(not item.drafts for item in stage.step()) and nines.interrupts == 1


def test_guesses_never_reach_beyond_what_may_be_generated(pipeline: Stage) -> None:
    pipeline.run("p", [1, 2, 3, 1, 2], computed=4, params=SamplingParams(max_tokens=2, temperature=0))
    assert [item.drafts for item in pipeline.step(FREE_ROWS)] == [1], "one token more is sampled behind the last guess"


def test_the_youngest_gives_its_pages_to_an_older_run_and_starts_again_when_they_are_free(alone: Stage) -> None:
    old = alone.run("old", [5] * 33, computed=32)
    young = alone.run("young", [6] * 64, computed=63)
    assert alone.table.pool.free_pages == 0
    assert names(alone.step()) == {"old"}, "its third page was the younger one's"
    assert young.computed == 0 and young.pages == [] and young.kv.preemptions == 1
    assert alone.step() == [], "four pages and one for the next token are not free"
    assert alone.table.drop("old", "old") and old.pages == []
    assert names(alone.step()) == {"young"}
    alone.table.check_integrity()


def test_guesses_take_no_page_from_anybody(alone: Stage) -> None:
    alone.run("old", [1, 2, 3] * 16, computed=47)
    alone.run("young", [6] * 48, computed=47)
    work = alone.step(FREE_ROWS)
    assert names(work) == {"old", "young"} and all(item.drafts == 0 for item in work)


def test_new_jobs_get_what_the_runs_here_leave(alone: Stage) -> None:
    assert alone.batcher.claimable_pages() == 6
    alone.run("p", [5] * 20, computed=16)
    assert alone.batcher.claimable_pages() == 3, "one it has, one it needs, one in store"
