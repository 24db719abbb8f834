"""What one step of the last stage commits for a run, from the tokens that were drawn behind it and its drafts."""

import numpy as np

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_worker.engine.rows.commit_builder import draws_of, next_tokens
from blockrelay_worker.engine.stage_role import StageRole
from blockrelay_worker.runs.run import Run
from blockrelay_worker.sampling.sampler import NO_TOKEN, Draw, Sampled
from blockrelay_worker.sampling.stop_conditions import Progress
from tests.support.worker.runs import GREEDY, new_run
from tests.support.worker.stage_role import stage_role


def _run_and_role(folder: BlockFolder) -> tuple[Run, StageRole]:
    run, blocks = new_run("r", [5, 6]), folder.model.blocks
    assert run.last is not None
    run.pages.append(0)
    run.last.progress = Progress(GREEDY, prompt=[5, 6], context=512, eos_ids=(), tokenizer=None)
    return run, stage_role(folder, "w", split=f"1-{blocks}", stage=0, first=1, last=blocks)


def _sampled(*tokens: int) -> list[Sampled]:
    return [Sampled(token=token) for token in tokens]


def test_a_token_behind_a_wrong_draft_does_not_count(w8a8: BlockFolder) -> None:
    run, role = _run_and_role(w8a8)
    commit = next_tokens(run, [7, 8], _sampled(7, 9, 10), role)
    assert commit is not None and commit.tokens == (7, 9)
    assert list(run.tokens) == [5, 6, 7, 9]


def test_without_an_allowed_token_nothing_is_committed(w8a8: BlockFolder) -> None:
    run, role = _run_and_role(w8a8)
    assert next_tokens(run, [], _sampled(NO_TOKEN), role) is None
    assert list(run.tokens) == [5, 6] and not run.ended


def test_a_dead_end_counts_only_behind_a_right_draft_and_then_in_the_next_step(w8a8: BlockFolder) -> None:
    run, role = _run_and_role(w8a8)
    wrong = next_tokens(run, [7], _sampled(9, NO_TOKEN), role)
    assert wrong is not None and wrong.tokens == (9,)
    right = next_tokens(run, [7], _sampled(7, NO_TOKEN), role)
    assert right is not None and right.tokens == (7,) and not right.end
    assert next_tokens(run, [], _sampled(NO_TOKEN), role) is None


def test_a_draw_behind_drafts_is_the_one_without_them(w8a8: BlockFolder) -> None:
    """Penalties and bad words see the drafts before a row as they will see these tokens once they are committed."""
    params = SamplingParams(
        max_tokens=100, temperature=0, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.7,
        min_tokens=3,
        logit_bias=((9, 2.0),), bad_words=((7, 8), (3,)),
    )  # fmt: skip
    rows = np.random.default_rng(1).normal(size=(3, 16)).astype(np.float32)

    def begun() -> tuple[Run, StageRole]:
        run, role = _run_and_role(w8a8)
        run.params = params
        assert run.last is not None
        run.last.progress = Progress(params, prompt=[5, 6], context=512, eos_ids=(2,), tokenizer=None)
        return run, role

    run, _ = begun()
    draws_of(run, list(rows), [3, 9])  # drafts that were rejected leave nothing behind
    together = draws_of(run, list(rows), [7, 7])
    one_by_one: list[Draw] = []
    alone, role = begun()
    for row, token in zip(rows, (7, 7, 4), strict=True):
        one_by_one += draws_of(alone, [row], [])
        next_tokens(alone, [], _sampled(token), role)
    assert [draw.position for draw in together] == [draw.position for draw in one_by_one] == [2, 3, 4]
    for found, expected in zip(together, one_by_one, strict=True):
        assert found.changes is not None and expected.changes is not None
        assert [each.tobytes() for each in found.changes] == [each.tobytes() for each in expected.changes]
    assert run.last is not None and run.last.counts is not None and run.last.counts.ids.tolist() == [5, 6]
