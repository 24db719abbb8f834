"""Law of the executor: whatever batches requests meet in, each gets the bits of its solo run."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay_converter.convert import convert
from tests.support.models.checkpoints import write_checkpoint
from tests.support.worker.stages import Chain, Part

_REQUESTS, _TOKENS, _PAGES_EACH = 4, 40, 3
_TOKEN_IDS = np.random.default_rng(4).integers(3, 259, (_REQUESTS, _TOKENS))


class Models:
    """One model as one stage, as three, and what every request gives alone."""

    def __init__(self, folder: BlockFolder) -> None:
        self.chains = [Chain(folder), Chain(folder, [1, 2, 3], threads=2)]
        solo = Chain(folder, variant="exact")
        self.alone: list[NDArray[np.float32]] = [solo.solo(ids.tolist(), [_TOKENS]) for ids in _TOKEN_IDS]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    # Odd sizes: three query heads per key head, a head_dim that is no power of two, a width that is no multiple of 16.
    root: Path = tmp_path_factory.mktemp("odd")
    write_checkpoint(
        root / "checkpoint",
        seed=8,
        hidden_size=56,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=24,
        intermediate_size=72,
        vocab_size=261,
        tie_word_embeddings=True,
    )
    convert(root / "checkpoint", root / "folder", precision="w8a8", report=lambda *_: None)
    return Models(open_block_folder(root / "folder"))


#: Steps of (request, rows): each step is a batch of distinct requests in any order.
_schedules = st.lists(
    st.lists(st.tuples(st.integers(0, _REQUESTS - 1), st.integers(1, 23)), min_size=1, unique_by=lambda part: part[0]),
    min_size=1,
    max_size=12,
)


@given(_schedules, st.permutations(range(_REQUESTS * _PAGES_EACH)), st.integers(0, 1))
@settings(max_examples=60, deadline=None)
def test_a_request_gets_the_bits_of_its_solo_run(
    models: Models, schedule: list[list[tuple[int, int]]], pages: list[int], which: int
) -> None:
    chain, done = models.chains[which], [0] * _REQUESTS
    for step in schedule:
        parts: list[Part] = []
        expected: list[NDArray[np.float32]] = []
        for request, wanted in step:
            first = done[request]
            rows = min(wanted, _TOKENS - first)
            if rows:
                own = pages[request * _PAGES_EACH : (request + 1) * _PAGES_EACH]
                tokens = _TOKEN_IDS[request, first : first + rows].tolist()
                parts.append(Part(tokens=tokens, first_position=first, pages=own))
                expected.append(models.alone[request][first : first + rows])
                done[request] += rows
        if parts:
            assert chain.run(parts).tobytes() == np.concatenate(expected).tobytes()
