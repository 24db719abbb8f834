"""A device that chooses from its logits: the tokens are those of whole rows, and little comes down."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.onnx.loading import OnnxExecutors
from blockrelay_worker.execution.onnx.providers.opening import open_provider
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider, Provider
from blockrelay_worker.execution.onnx.selection import Selection
from blockrelay_worker.execution.onnx.stage import OnnxStage
from blockrelay_worker.execution.selection import MAX_LARGEST, Largest
from blockrelay_worker.sampling.sampler import Draw, need_of, sample
from tests.support.worker.onnx_devices import NAMES

VOCABULARY = 3001
ASKED = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.5, top_k=20),
    SamplingParams(temperature=0.5, top_p=0.9),
    SamplingParams(temperature=2.0, top_p=0.999),
    SamplingParams(temperature=0),
]


@cache
def selection(device: str, vocabulary: int) -> tuple[Provider, Selection]:
    provider = open_provider(device)
    return provider, Selection(provider, vocabulary)


@pytest.mark.parametrize("device", NAMES)
def test_each_row_brings_down_what_it_needs(device: str) -> None:
    provider, chooser = selection(device, VOCABULARY)
    assert chooser.able == ("best", "largest"), chooser.refused
    logits = (np.random.default_rng(5).normal(size=(len(ASKED), VOCABULARY)) * 4).round(1).astype(np.float32)
    there = provider.upload(provider.session(chooser._graphs["rows"]), logits)  # pyright: ignore[reportPrivateUsage]
    needs = [need_of(params) for params in ASKED]
    rows, finite, down = chooser.rows(there, needs)
    assert finite.all()
    assert [isinstance(row, Largest) for row in rows] == [True, False, True, True, False, True]
    for row, whole, params in zip(rows, logits, ASKED, strict=True):
        for position in range(20):
            of_row, of_whole = (sample(Draw(one, params, 3, position)) for one in (row, whole))
            assert of_row == of_whole
    # Two arg-maxes with a sum; three times the largest with a total and a sum, one in vain; two whole rows.
    assert down == 2 * 12 + 3 * (12 * MAX_LARGEST + 8) + 2 * 4 * VOCABULARY


@pytest.mark.parametrize("device", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_told(device: str, bad: float) -> None:
    provider, chooser = selection(device, VOCABULARY)
    logits = np.zeros((3, VOCABULARY), np.float32)
    logits[1, 7] = bad
    there = provider.upload(provider.session(chooser._graphs["rows"]), logits)  # pyright: ignore[reportPrivateUsage]
    for params in (SamplingParams(temperature=0), SamplingParams(top_k=5), SamplingParams()):
        assert chooser.rows(there, [need_of(params)] * 3)[1].tolist() == [True, False, True]


def test_what_a_device_chooses_wrongly_it_does_not_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a device that takes the last of equal logits, and has no kernel for the largest ones
    from blockrelay_worker.execution.onnx import selection as module

    right = module.best_graph(VOCABULARY)
    assert b"ArgMax" in right
    last = right.replace(b"ArgMax", b"ArgMin")  # whatever it is, it is wrong
    monkeypatch.setattr(module, "best_graph", lambda vocabulary: last)
    monkeypatch.setattr(module, "largest_graph", lambda vocabulary, count: right.replace(b"ArgMax", b"NoSuch"))
    chooser = Selection(CpuProvider(), VOCABULARY)
    # Then rows come down whole
    assert chooser.able == () and set(chooser.refused) == {"best", "largest"}
    assert not chooser.wants([0], [need_of(SamplingParams(temperature=0))])
    logits = CpuProvider().upload(None, np.eye(2, VOCABULARY, dtype=np.float32))  # type: ignore[arg-type]
    rows, _, down = chooser.rows(logits, [need_of(SamplingParams(temperature=0))] * 2)
    assert [sample(Draw(row, SamplingParams(temperature=0), 1, 1)).token for row in rows] == [0, 1]
    assert down == 2 * 4 * VOCABULARY


@pytest.mark.parametrize("device", NAMES)
def test_a_stage_brings_down_a_few_bytes_for_a_greedy_token(device: str, fp32: BlockFolder) -> None:
    executors, vocabulary = OnnxExecutors(open_provider(device)), fp32.model.vocab_size
    stage = executors.load(fp32, 1, fp32.model.blocks, pages=8)
    assert isinstance(stage, OnnxStage) and "best" in stage.details["selects"]
    segments = [Segment(rows=20, first_position=0, pages=(3, 1)), Segment(rows=3, first_position=0, pages=(5,))]
    batch = Batch(segments=segments, tokens=np.arange(5, 28, dtype=np.int32), wanted=[19, 22])
    stage.moved_bytes()
    whole = stage.run(batch)
    assert whole.logits is not None and whole.rows is None
    best, before = whole.logits.argmax(axis=1).tolist(), stage.moved_bytes()[1]
    # When the tokens are greedy, in the one graph and block by block
    for measured in (False, True):
        if measured:
            stage._times.measure_next()  # pyright: ignore[reportPrivateUsage]
        chosen = stage.run(replace(batch, needs=[need_of(SamplingParams(temperature=0))] * 2))
        # Then they are those of the rows, of which nothing comes down
        assert chosen.rows is not None and chosen.logits is None
        tokens = [sample(Draw(row, SamplingParams(temperature=0), 1, 1)).token for row in chosen.rows]
        assert tokens == best
        assert before - stage.moved_bytes()[1] == 2 * (4 * vocabulary - 12)
    # And a prompt's chunk, of which nobody wants a token, brings down no row either
    none = stage.run(replace(batch, wanted=[]))
    assert none.logits is not None and none.logits.shape == (0, vocabulary)
    assert stage.moved_bytes()[1] == 23 * 4
