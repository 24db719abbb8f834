"""A worker with inject_numerics computes other bits, just as exactly, under a numerics id of its own."""

import numpy as np
import pytest
from pydantic import ValidationError

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.settings import WorkerSettings
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.cpu.loading import load_stage
from blockrelay_worker.execution.fault_injection import SaltedExecutor, salted_id
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.offline.pipeline import Pipeline, generate

PROMPT = list(range(5, 45))


def _logits(folder: BlockFolder, salt: str, *, stages: int = 1, chunk: int = len(PROMPT)) -> bytes:
    pipeline = Pipeline(folder, stages=stages, threads=1, tokens=64, salt=salt)
    rows = [pipeline.run(PROMPT[first : first + chunk], first) for first in range(0, len(PROMPT), chunk)]
    return rows[-1].tobytes()


def test_each_salt_has_bits_of_its_own_whatever_the_chunks_and_stages(w8a8: BlockFolder) -> None:
    """Equal numerics ids promise equal bits: a salted worker keeps that promise too."""
    answers = {salt: _logits(w8a8, salt) for salt in ("", "new", "newer")}
    assert len(set(answers.values())) == 3
    for salt, alone in answers.items():
        assert _logits(w8a8, salt, stages=3, chunk=7) == alone
    rows = [np.frombuffer(one, np.float32) for one in answers.values()]
    assert all(np.isfinite(row).all() for row in rows)


def _pages(folder: BlockFolder, salt: str) -> bytes:
    """Keys and values of the prompt, of all layers."""
    last = folder.model.blocks
    stage = load_stage(folder, 1, last, pages=4, threads=1, kernels=load_kernels(1))
    executor = SaltedExecutor(stage, salt=salt, vocabulary=folder.model.vocab_size) if salt else stage
    segment = Segment(rows=32, first_position=0, pages=[0, 1])
    executor.run(Batch(segments=[segment], tokens=np.asarray(PROMPT[:32], np.int32), wanted=[31]))
    return b"".join(pages[:2].tobytes() for pages in (*stage.memory.k_pages, *stage.memory.v_pages))


def test_pages_are_others_too(w8a8: BlockFolder) -> None:
    """So that a page found under another id would be noticed."""
    assert len({_pages(w8a8, salt) for salt in ("", "new", "newer")}) == 3
    assert _pages(w8a8, "new") == _pages(w8a8, "new")


def test_the_rest_goes_on_behind_known_tokens(w8a8: BlockFolder) -> None:
    pipeline = Pipeline(w8a8, stages=1, threads=1, tokens=128)
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=7, ignore_eos=True)
    whole = generate(pipeline, PROMPT, params, seed=7, tokenizer=None)
    rest = generate(pipeline, PROMPT, params, seed=7, tokenizer=None, known=whole.tokens[:11])
    assert whole.tokens[11:] == rest.tokens


def test_the_id_says_so_and_nothing_else_names_one() -> None:
    assert salted_id("w8a8-0123", "") == "w8a8-0123"
    assert salted_id("w8a8-0123", "new") == "w8a8-0123-new"
    assert WorkerSettings(inject_numerics="new").inject_numerics == "new"
    for wrong in ("New", "a+b", "a@1", "x" * 17):
        with pytest.raises(ValidationError, match="inject_numerics"):
            WorkerSettings(inject_numerics=wrong)
