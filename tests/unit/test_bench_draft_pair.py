"""The pair of models for measurements: the small one guesses what the large one says, though it has one layer."""

from pathlib import Path

from bench.draft_pair import write_pair
from blockrelay.block_folder.draft_folder import open_draft
from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_worker.offline.pipeline import Pipeline, generate


def story(folder: BlockFolder) -> list[int]:
    pipeline = Pipeline(folder, stages=1, threads=1, tokens=64)
    params = SamplingParams(max_tokens=40, temperature=0.8, ignore_eos=True)
    return list(generate(pipeline, (5, 6, 7), params, seed=3, tokenizer=None).tokens)


def test_without_noise_both_draw_the_same_tokens_and_with_it_others(tmp_path: Path) -> None:
    for name, noise in (("right", 0.0), ("wrong", 5.0)):
        (tmp_path / name).mkdir()
        write_pair(tmp_path / name, shape="tiny", precision="w8a8", noise=noise)
    served = open_block_folder(tmp_path / "right/served")
    right, wrong = (open_draft(tmp_path / name / "draft", served) for name in ("right", "wrong"))
    assert (served.model.blocks, right.model.blocks) == (3, 2), "two layers and the head, one and the head"
    assert story(right) == story(served) != story(wrong)
