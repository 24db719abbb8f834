"""A token's logits depend on the tokens before it and on nothing else, bit by bit."""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import BlockFolderError, ExecutionError
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.kernels import load_kernels
from tests.support.worker.stages import Chain, Part

needs_products = pytest.mark.skipif(not load_kernels(1).has_matmul, reason="no kernels of this CPU have products")


def _tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, count).tolist()


@pytest.fixture(scope="session", params=["w8a8", "w4a8", "mixed_exact"])
def exact(request: pytest.FixtureRequest) -> BlockFolder:
    """The model in each exact precision."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def expected(exact: BlockFolder) -> NDArray[np.float32]:
    """64 tokens, one at a time, one stage, one thread."""
    return Chain(exact).solo(_tokens(64))


def _same_bits(left: NDArray[np.float32], right: NDArray[np.float32]) -> None:
    assert left.shape == right.shape
    assert left.tobytes() == right.tobytes()


@pytest.mark.parametrize("chunks", [[64], [7] * 9 + [1], [32, 32], [63, 1], [1, 63], [16] * 4, [3, 17, 29, 15]])
def test_the_way_a_prompt_is_cut_does_not_show(
    exact: BlockFolder, expected: NDArray[np.float32], chunks: Sequence[int]
) -> None:
    _same_bits(Chain(exact).solo(_tokens(64), chunks), expected)


@pytest.mark.parametrize("ends", [[5], [2, 5], [4, 5], [1, 3, 5], [1, 2, 3, 4, 5]])
def test_the_stages_a_model_is_cut_into_do_not_show(
    exact: BlockFolder, expected: NDArray[np.float32], ends: Sequence[int]
) -> None:
    _same_bits(Chain(exact, ends).solo(_tokens(64), [20, 1, 43]), expected)


def test_the_number_of_threads_does_not_show(exact: BlockFolder, expected: NDArray[np.float32]) -> None:
    _same_bits(Chain(exact, threads=2).solo(_tokens(64), [40, 1, 1, 22]), expected)


@pytest.mark.parametrize("ends", [[5], [4, 5], [3, 5]])
@pytest.mark.parametrize("wanted", [[], [23], [0, 22, 23], [5, 39, 40, 41, 44]])
def test_the_rows_whose_logits_nobody_wants_do_not_show(
    exact: BlockFolder, expected: NDArray[np.float32], ends: Sequence[int], wanted: Sequence[int]
) -> None:
    chain, tokens = Chain(exact, ends), _tokens(64)
    # Given two requests in one batch, rows 0 to 23 and 24 to 44, and the first one's rest afterwards
    parts = [
        Part(tokens=tokens[:24], first_position=0, pages=[0, 1, 2, 3]),
        Part(tokens=tokens[:21], first_position=0, pages=[4, 5]),
    ]
    position_of = [*range(24), *range(21)]
    _same_bits(chain.run(parts, wanted), expected[[position_of[row] for row in wanted]])
    # Then the keys and values of every row are there
    rest = [Part(tokens=tokens[24:], first_position=24, pages=[0, 1, 2, 3])]
    _same_bits(chain.run(rest), expected[24:])


@pytest.mark.parametrize("variant", ["u8u8", "exact"])
def test_every_variant_of_the_products_gives_the_same_bits(
    exact: BlockFolder, expected: NDArray[np.float32], variant: str
) -> None:
    chain = Chain(exact, variant="u8u8" if variant == "u8u8" else "exact")
    _same_bits(chain.solo(_tokens(64), [30, 34]), expected)


@needs_products
@pytest.mark.parametrize("ends", [[5], [2, 5], [4, 5]])
@pytest.mark.parametrize("threads", [1, 2])
def test_programs_of_the_kernels_give_the_same_bits(
    exact: BlockFolder, expected: NDArray[np.float32], ends: Sequence[int], threads: int
) -> None:
    # Given two requests, one of them some way behind the other, whose steps are of a few shapes only
    chain, tokens = Chain(exact, ends, threads=threads, variant="native"), _tokens(64)
    chain.solo(tokens[:7], [3, 4], first_page=9)
    rows: list[NDArray[np.float32]] = []
    for position in range(57):
        parts = [
            Part(tokens=[tokens[position]], first_position=position, pages=[3, 1, 0, 2]),
            Part(tokens=[tokens[position + 7]], first_position=position + 7, pages=[9, 6, 5, 4]),
        ]
        logits = chain.run(parts)
        _same_bits(logits[1:], expected[position + 7 : position + 8])
        rows.append(logits[:1])
        if position in (20, 40):  # larger batches in between move the buffers
            other = _tokens(position, 9)
            chain.run([Part(tokens=other, first_position=0, pages=[10, 11, 12])], [position - 1])
            chain.run([Part(tokens=other, first_position=0, pages=[10, 11, 12])])
    _same_bits(np.concatenate(rows), expected[:57])


@needs_products
def test_a_block_that_fails_in_a_program_is_named(exact: BlockFolder) -> None:
    # Given a layer with fewer pages than the pool says
    stage = Chain(exact, [1, 5], variant="native").stages[1]
    memory = stage.memory
    memory.k_pages[1], memory.v_pages[1] = memory.k_pages[1][:4], memory.v_pages[1][:4]
    hidden = np.random.default_rng(2).normal(size=(1, 64)).astype(np.float32)
    batch = Batch(segments=[Segment(rows=1, first_position=0, pages=[4])], hidden=hidden, wanted=[0])
    with pytest.raises(ExecutionError, match=r"block_3: kernel argument page: row 0 has 4, outside 0\.\.3") as caught:
        stage.run(batch)
    assert caught.value.block == "block_3"

    # Then another batch of that shape runs
    assert stage.run(replace(batch, segments=[Segment(rows=1, first_position=0, pages=[3])])).not_finite == ()


def test_a_batch_mate_does_not_show(exact: BlockFolder, expected: NDArray[np.float32]) -> None:
    # Given five requests of other lengths that have come some way, scattered over the pool
    chain = Chain(exact)
    free = np.random.default_rng(1).permutation(200).tolist()
    mine = [free.pop() for _ in range(4)]
    others = [(_tokens(33 + 7 * index, index + 1), [free.pop() for _ in range(7)]) for index in range(5)]
    chain.run([Part(tokens=tokens[:30], first_position=0, pages=pages) for tokens, pages in others])

    # When a request runs among them, prompt chunks and single tokens mixed
    tokens = _tokens(64)
    rows: list[NDArray[np.float32]] = []
    mates = [Part(tokens=t[30 : 31 + 3 * index], first_position=30, pages=p) for index, (t, p) in enumerate(others)]
    for first, last in ((0, 40), (40, 41), (41, 64)):
        me = Part(tokens=tokens[first:last], first_position=first, pages=mine)
        before = sum(len(mate.tokens) for mate in mates[:2])
        rows.append(chain.run([*mates[:2], me, *mates[2:]])[before : before + last - first])

    # Then its rows are those of its solo run, and so are its neighbours'
    _same_bits(np.concatenate(rows), expected)
    tokens, pages = others[4]
    alone = Chain(exact).solo(tokens[:43], [43])
    part = Part(tokens=tokens[30:43], first_position=30, pages=pages)
    _same_bits(chain.run([part]), alone[30:])


def test_a_segment_may_go_back_and_overwrite_what_was_there(exact: BlockFolder, expected: NDArray[np.float32]) -> None:
    chain, tokens, pages = Chain(exact), _tokens(64), [3, 1, 2, 0]
    chain.run([Part(tokens=[*tokens[:30], *_tokens(20, 9)], first_position=0, pages=pages)])
    rows = chain.run([Part(tokens=tokens[30:], first_position=30, pages=pages)])
    _same_bits(rows, expected[30:])


def test_float32_is_close_to_w8a8_and_to_itself_in_other_chunks(
    fp32: BlockFolder, w8a8: BlockFolder, w4a8: BlockFolder, mixed_exact: BlockFolder, mixed: BlockFolder
) -> None:
    tokens = _tokens(48)
    whole, single = Chain(fp32).solo(tokens, [48]), Chain(fp32, [2, 5]).solo(tokens)
    np.testing.assert_allclose(whole, single, rtol=0, atol=1e-4)
    for folder, least in ((w8a8, 0.99), (w4a8, 0.95), (mixed_exact, 0.95), (mixed, 0.95)):
        quantised = Chain(folder).solo(tokens, [48])
        assert np.corrcoef(whole.ravel(), quantised.ravel())[0, 1] > least


def test_float16_weights_are_widened_and_computed_with_as_fp32_is(fp32: BlockFolder, fp16: BlockFolder) -> None:
    tokens = _tokens(48)
    wide, narrow = Chain(fp32).solo(tokens, [48]), Chain(fp16).solo(tokens, [48])
    # Weights and pages are rounded by 2**-11 at most, logits go up to 16.
    assert 0 < np.abs(narrow - wide).max() < 0.05
    np.testing.assert_allclose(Chain(fp16, [2, 5]).solo(tokens), narrow, rtol=0, atol=2e-2)


def test_only_wanted_rows_get_logits_and_every_block_is_timed(w8a8: BlockFolder) -> None:
    chain, tokens = Chain(w8a8), _tokens(20)
    everything = chain.solo(tokens, [20])
    output = chain.stages[0].run(
        Batch(
            segments=[Segment(rows=20, first_position=0, pages=[5, 6])],
            tokens=np.array(tokens, np.int32),
            wanted=[3, 19],
        )
    )
    assert output.hidden is None
    assert output.logits is not None
    _same_bits(output.logits, everything[[3, 19]])
    assert list(output.seconds) == [f"block_{index}" for index in range(1, 6)]


@needs_products
def test_every_block_of_a_program_is_timed(w8a8: BlockFolder) -> None:
    chain = Chain(w8a8, variant="native")
    for position in range(2):
        segments = [Segment(rows=1, first_position=position, pages=[0])]
        started = time.perf_counter()
        output = chain.stages[0].run(Batch(segments=segments, tokens=np.array([7], np.int32), wanted=[0]))
        assert list(output.seconds) == [f"block_{index}" for index in range(1, 6)]
        assert min(output.seconds.values()) > 0
        assert sum(output.seconds.values()) < time.perf_counter() - started


def test_a_row_that_is_not_finite_fails_its_segment_and_no_other(w8a8: BlockFolder) -> None:
    # Given rows between two stages, one of which has overflowed
    chain = Chain(w8a8, [2, 5])
    rows = np.random.default_rng(2).normal(size=(6, 64)).astype(np.float32)
    segments = [Segment(rows=2, first_position=0, pages=[page]) for page in range(3)]
    clean = chain.stages[1].run(Batch(segments=segments, hidden=rows, wanted=range(6))).logits
    assert clean is not None
    clean = clean.copy()
    rows[2, 7] = np.inf

    output = chain.stages[1].run(Batch(segments=segments, hidden=rows, wanted=range(6)))

    assert output.not_finite == (1,)
    assert output.logits is not None
    _same_bits(output.logits[[0, 1, 4, 5]], clean[[0, 1, 4, 5]])


@pytest.mark.parametrize(
    ("segment", "tokens", "complaint"),
    [
        (Segment(rows=1, first_position=512, pages=list(range(40))), [5], "positions 512"),
        (Segment(rows=17, first_position=0, pages=[0]), [5] * 17, "1 pages do not reach position 16"),
        (Segment(rows=1, first_position=0, pages=[200]), [5], "page id"),
        (Segment(rows=1, first_position=0, pages=[0]), [512], "token id"),
        (Segment(rows=1, first_position=0, pages=[0]), [5, 6], "1 token ids"),
        (Segment(rows=0, first_position=0, pages=[0]), [], "positions"),
    ],
)
def test_a_batch_that_makes_no_sense_is_refused(
    w8a8: BlockFolder, segment: Segment, tokens: list[int], complaint: str
) -> None:
    with pytest.raises(ExecutionError, match=complaint):
        Chain(w8a8).stages[0].run(Batch(segments=[segment], tokens=np.array(tokens, np.int32)))


def test_rows_of_another_shape_are_refused(w8a8: BlockFolder) -> None:
    stage = Chain(w8a8, [2, 5]).stages[1]
    segments = [Segment(rows=2, first_position=0, pages=[0])]
    for hidden in (None, np.zeros((2, 63), np.float32), np.zeros((1, 64), np.float32), np.zeros((2, 64), np.float64)):
        with pytest.raises(ExecutionError, match=r"float32 rows \[2, 64\]"):
            stage.run(Batch(segments=segments, hidden=hidden))  # pyright: ignore[reportArgumentType]


def test_a_block_that_fails_is_named_and_the_batch_may_be_run_again(
    w8a8: BlockFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a kernel that fails in the third block
    stage = Chain(w8a8).stages[0]
    batch = Batch(
        segments=[Segment(rows=20, first_position=0, pages=[4, 7])], tokens=np.array(_tokens(20), np.int32), wanted=[19]
    )
    kernels, calls = load_kernels(1), 0

    class Failing:
        def __getattr__(self, name: str) -> object:
            return getattr(kernels, name)

        def attention(self, *arguments: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise MemoryError("no memory")
            return kernels.attention(*arguments, **options)  # pyright: ignore[reportArgumentType]

    with monkeypatch.context() as patch:
        for layer in list(stage.blocks.values())[:-1]:
            patch.setattr(layer, "_kernels", Failing())
        with pytest.raises(ExecutionError, match="block_3 failed: no memory") as caught:
            stage.run(batch)
    assert caught.value.block == "block_3"

    # Then the same batch gives what it should
    logits = stage.run(batch).logits
    assert logits is not None
    _same_bits(logits, Chain(w8a8).solo(_tokens(20))[19:])


def test_a_graph_that_cannot_be_loaded_is_refused_by_its_file(w8a8: BlockFolder) -> None:
    spoiled = replace(w8a8.manifest, graphs={**w8a8.manifest.graphs, "o": "tokenizer.json"})
    with pytest.raises(BlockFolderError, match=r"tokenizer\.json: ONNX Runtime refuses it"):
        Chain(replace(w8a8, manifest=spoiled), variant="u8s8")


def test_blocks_that_do_not_exist_are_refused(w8a8: BlockFolder) -> None:
    with pytest.raises(BlockFolderError, match="no blocks 3 to 9"):
        Chain(w8a8, [2, 9])
