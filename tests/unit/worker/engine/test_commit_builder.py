"""What one step of the last stage commits for a run, from the tokens that were drawn behind it and its drafts."""

from blockrelay.block_folder.folder import BlockFolder
from blockrelay_worker.engine.rows.commit_builder import next_tokens
from blockrelay_worker.engine.stage_role import StageRole
from blockrelay_worker.runs.run import Run
from blockrelay_worker.sampling.sampler import NO_TOKEN, Sampled
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
