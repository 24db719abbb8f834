"""Rows that score a prompt: which they are, how many a step has, and that none comes from the prefix cache."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.encoding.prompt_logprobs import PromptLogprobs
from blockrelay.protocol.messages import TokenEntry
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_worker.engine.rows.batch_builder import batch_of, scored_rows, wanted_rows, within_logits
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.cpu.stage import StageExecutor
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.policy import SCORED_ROWS
from blockrelay_worker.runs.run import Run
from blockrelay_worker.sampling.prompt_scores import PromptScores
from blockrelay_worker.scheduling.step_cost import StepCost
from blockrelay_worker.scheduling.work import Work
from tests.support.cell import Cell, body
from tests.support.prompt_logprobs import scores_by_numpy
from tests.support.waiting import wait_until
from tests.support.worker.first_stage import Stage
from tests.support.worker.running_engine import end_of, engine_running
from tests.support.worker.runs import GREEDY, new_run
from tests.support.worker.stage_role import stage_role

SCORING = replace(GREEDY, prompt_logprobs=2)


def _scoring(prompt: list[int], params: SamplingParams = SCORING) -> Run:
    run = new_run("r", prompt, params=params)
    assert run.last is not None and params.prompt_logprobs is not None
    run.last.scores = PromptScores(run.body.prompt, params.prompt_logprobs, vocab_size=500)
    return run


def _work(run: Run, position: int, rows: int, *, drafts: int = 0) -> Work:
    tokens = [*run.tokens[position : position + rows], *[9] * drafts]
    samples = position + rows == len(run.tokens)
    return Work(run=run, position=position, tokens=tokens, samples=samples, drafts=drafts)


def test_every_row_but_the_last_of_the_prompt_is_scored_and_the_last_is_drawn_from() -> None:
    run = _scoring([5, 6, 7, 8])
    assert list(scored_rows(_work(run, 0, 2))) == list(wanted_rows(_work(run, 0, 2))) == [0, 1]
    assert list(scored_rows(_work(run, 2, 2))) == [0]
    assert list(wanted_rows(_work(run, 2, 2))) == [0, 1]
    assert list(wanted_rows(_work(run, 3, 1, drafts=2))) == [0, 1, 2], "a draft is no token of the prompt"


def test_a_device_gives_whole_rows_for_scores_and_only_for_them(w8a8: BlockFolder) -> None:
    run, blocks = _scoring([5, 6, 7, 8]), w8a8.model.blocks
    role = stage_role(w8a8, "w", split=f"1-{blocks}", stage=0, first=1, last=blocks)
    batch = batch_of([_work(run, 0, 4)], role)
    assert list(batch.wanted) == [0, 1, 2, 3]
    assert [need is None for need in batch.needs] == [True, True, True, False]


def test_a_step_scores_a_bounded_number_of_rows() -> None:
    runs = [_scoring([1] * 200) for _ in range(4)]
    plain = new_run("p", [1] * 900)
    work = [_work(plain, 0, 900), *(_work(run, 0, 150) for run in runs)]
    batches = within_logits(work)
    assert [item for batch in batches for item in batch] == work
    assert all(sum(len(scored_rows(item)) for item in batch) <= SCORED_ROWS for batch in batches)
    assert [len(batch) for batch in batches] == [2, 1, 1, 1]
    assert within_logits(work[:1]) == [work[:1]]
    long = _scoring([1] * (3 * SCORED_ROWS))
    assert long.step_tokens == SCORED_ROWS < long.missing
    long.kv.pages += range(100)
    long.tokens_computed(len(long.tokens) - 1)
    assert long.step_tokens == long.missing == 1


def test_only_pages_whose_rows_are_scored_are_reused() -> None:
    run = _scoring([3] * 40)
    assert run.reusable == 0, "the cache has no logits"
    assert run.last is not None and run.last.scores is not None
    run.last.scores.known = 20  # a run that gave its pages away keeps its scores
    assert run.reusable == 20
    run.last.scores.known = 39
    assert run.reusable == 39
    elsewhere = new_run("r", [3] * 40, params=SCORING)
    elsewhere.last = None
    assert elsewhere.reusable == 0
    assert new_run("r", [3] * 40).reusable == 39


def test_a_first_stage_cuts_the_prompt_of_a_scoring_request(w8a8: BlockFolder, cell: Cell) -> None:
    stage = Stage(w8a8, cell, last=w8a8.model.blocks, pages=64, max_rows=1000)
    cheap = StepCost(decode_s=1e-6, prompt_token_s=1e-6)
    run = stage.run("p", [7] * 400, computed=0, params=SCORING)
    assert [item.rows for _ in range(2) for item in stage.step(cheap)] == [SCORED_ROWS, 400 - SCORED_ROWS]
    stage.table.drop(run.request_id, run.run_id)
    stage.run("plain", [7] * 400, computed=0)
    assert [item.rows for item in stage.step(cheap)] == [400]


def _rows(folder: BlockFolder, prompt: list[int]) -> list[NDArray[np.float32]]:
    """Logits behind each token of the prompt but the last, by an executor like that of the engine, in one step."""
    blocks, tokens = folder.model.blocks, np.array(prompt, np.int32)
    executor = StageExecutor(folder, 1, blocks, pages=10, threads=1, kernels=load_kernels(1))
    segment = Segment(rows=len(prompt), first_position=0, pages=executor.pool.allocate(10))
    output = executor.run(Batch(segments=[segment], tokens=tokens, wanted=range(len(prompt))))
    assert output.logits is not None
    return list(output.logits[:-1])


def test_the_end_of_a_request_has_the_scores_of_its_prompt(w8a8: BlockFolder, cell: Cell) -> None:
    """A prompt has its scores beside other requests, without new tokens, and if the cache has its pages."""
    prompts = {"req-a": [7, 8, 9] * 30, "req-b": [7, 8, 9] * 30, "req-c": [11, 12, 13, 14], "req-d": [400]}
    limits = {"req-a": 8, "req-b": 3, "req-c": 0, "req-d": 2}
    with engine_running(w8a8, cell, broken=lambda executor: executor):
        cell.accept("req-plain", content=body([7, 8, 9] * 30, ignore_eos=True, temperature=0.0))
        for name, prompt in prompts.items():
            fields = {"ignore_eos": True, "temperature": 0.0, "prompt_logprobs": 4, "max_tokens": limits[name]}
            cell.accept(name, content=body(prompt, **fields))
        wait_until(lambda: all(end_of(cell, name) for name in ("req-plain", *prompts)), "all end", timeout_s=30)
    plain = end_of(cell, "req-plain")
    assert plain is not None and "prompt_logprobs" not in plain.meta
    for name, prompt in prompts.items():
        end = end_of(cell, name)
        assert end is not None and end.reason == "length", (name, end)
        assert sum(isinstance(entry, TokenEntry) for entry in cell.log(name)) == limits[name]
        if limits[name] == 0:
            assert end.executed == (0, w8a8.model.blocks)
        assert end.meta["prompt_logprobs"] == scores_by_numpy(_rows(w8a8, prompt), prompt, listed=4), name
        found = PromptLogprobs.decode(end.meta["prompt_logprobs"], tokens=len(prompt))
        assert np.all(found.logprobs <= 0) and np.all(found.ranks >= 1)
