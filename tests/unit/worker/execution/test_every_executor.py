"""What holds for whatever runs a stage, and for what stands in front of it to inject faults."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import ExecutionError
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.fault_injection import FailingExecutor, SaltedExecutor, SlowedExecutor, salted_id
from blockrelay_worker.execution.loader import IMPLEMENTATIONS, executors_for
from blockrelay_worker.execution.numerics_id import numerics_id

PAGES = 8
PROMPT = list(range(5, 45))
Wrap = Callable[[Executor, BlockFolder], Executor]
WRAPS: dict[str, Wrap] = {
    "plain": lambda executor, folder: executor,
    "failing": lambda executor, folder: FailingExecutor(executor, after=100, block="block_1"),
    "slowed": lambda executor, folder: SlowedExecutor(executor, speed=0.5),
    "salted": lambda executor, folder: SaltedExecutor(executor, salt="x", vocabulary=folder.model.vocab_size),
}


@pytest.fixture(params=["w8a8", "w4a8", "fp32", "mixed_exact", "mixed"])
def folder(request: pytest.FixtureRequest) -> BlockFolder:
    return request.getfixturevalue(request.param)


@pytest.fixture(
    params=[(kind, wrap) for kind in IMPLEMENTATIONS for wrap in WRAPS], ids=lambda p: f"{p[0].__name__}-{p[1]}"
)
def load(request: pytest.FixtureRequest, folder: BlockFolder) -> Callable[[int, int], Executor]:
    """Loads blocks first to last."""
    implementation, wrap = request.param
    executors = implementation(1)
    return lambda first, last: WRAPS[wrap](executors.load(folder, first, last, pages=PAGES), folder)


def run(
    executor: Executor,
    parts: Sequence[tuple[Sequence[int], int, Sequence[int]]],
    hidden: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """The rows or logits, copied, of a batch of (tokens, first position, pages)."""
    tokens = np.array([token for part, _, _ in parts for token in part], np.int32)
    output = executor.run(
        Batch(
            segments=[Segment(rows=len(part), first_position=first, pages=pages) for part, first, pages in parts],
            tokens=tokens if executor.takes_tokens else None,
            hidden=hidden,
            wanted=range(len(tokens)) if executor.gives_logits else (),
        )
    )
    assert output.not_finite == () and (output.hidden is None) == executor.gives_logits
    result = output.logits if output.hidden is None else output.hidden
    assert result is not None
    return result.copy()


def test_it_says_what_it_can_do(folder: BlockFolder, load: Callable[[int, int], Executor]) -> None:
    executor = load(1, folder.model.blocks)
    able = executor.capabilities
    assert able.exact == folder.manifest.exact and able.precision == folder.manifest.precision
    own = executors_for("cpu", folder, threads=1).numerics_id(folder.manifest)
    assert own == numerics_id(folder.manifest)
    assert able.numerics_id in (own, salted_id(own, "x"))
    assert able.kv_tokens == 16 * executor.pool.pages == 16 * PAGES
    assert min(able.max_rows, able.max_sequences) >= 1
    assert executor.takes_tokens and executor.gives_logits and executor.details
    assert executor.layout == executor.pool.layout and executor.layout.layers == folder.model.layers
    assert executor.pool.free_pages == PAGES, "nobody has pages yet"


def test_a_row_does_not_depend_on_its_batch(folder: BlockFolder, load: Callable[[int, int], Executor]) -> None:
    one, other = load(1, folder.model.blocks), load(1, folder.model.blocks)
    alone = run(one, [(PROMPT, 0, [0, 1, 2])])
    beside = np.concatenate(
        [
            run(other, [(PROMPT[:17], 0, [5, 3, 6]), ([9, 8, 7], 0, [1])])[:17],
            run(other, [([6], 3, [1]), (PROMPT[17:], 17, [5, 3, 6])])[1:],
        ]
    )
    if one.capabilities.exact:
        assert alone.tobytes() == beside.tobytes()
    else:
        np.testing.assert_allclose(alone, beside, rtol=1e-4, atol=1e-4)


def test_pages_move_to_another_executor_and_the_next_logits_have_the_same_bits(
    folder: BlockFolder, load: Callable[[int, int], Executor]
) -> None:
    # Given a request whose beginning one executor has computed
    last = folder.model.blocks
    here, there = load(1, last), load(1, last)
    run(here, [(PROMPT[:-1], 0, [2, 0, 5])])
    # When its pages go to other places in another one, where somebody else has pages too
    neighbour = run(there, [(PROMPT[3:20], 0, [1, 2])])
    there.import_pages([4, 7, 0], here.export_pages([2, 0, 5]))
    # Then both go on alike, and nobody else's pages have changed
    for position in (len(PROMPT) - 1, len(PROMPT)):
        token = [PROMPT[-1] + position]
        assert (
            run(here, [(token, position, [2, 0, 5])]).tobytes() == run(there, [(token, position, [4, 7, 0])]).tobytes()
        )
    np.testing.assert_allclose(run(there, [(PROMPT[19:20], 16, [1, 2])]), neighbour[-1:], rtol=1e-4, atol=1e-4)


def test_exported_pages_have_the_layout_that_it_names(
    folder: BlockFolder, load: Callable[[int, int], Executor]
) -> None:
    executor = load(2, 3)
    layout = executor.layout
    assert layout.layers == 2 and not executor.takes_tokens and not executor.gives_logits
    run(executor, [(PROMPT[:16], 0, [3])], np.ones((16, folder.model.hidden_size), np.float32))
    (content,) = executor.export_pages([3])
    for keys, values in content:
        assert keys.shape == (layout.kv_heads, layout.head_dim, 16)
        assert values.shape == (layout.kv_heads, 16, layout.head_dim)
        assert keys.dtype == values.dtype == layout.dtype
    assert sum(half.nbytes for halves in content for half in halves) == layout.bytes_per_page
    assert executor.export_pages([]) == []


def test_a_batch_that_makes_no_sense_is_refused_and_the_next_one_is_not(
    folder: BlockFolder, load: Callable[[int, int], Executor]
) -> None:
    executor = load(1, folder.model.blocks)
    for pages in ([], [PAGES]):
        with pytest.raises(ExecutionError):
            run(executor, [(PROMPT[:4], 0, pages)])
    assert run(executor, [(PROMPT[:4], 0, [0])]).shape == (4, folder.model.vocab_size)
    executor.close()


def test_a_fault_that_was_asked_for_comes_after_so_many_batches(w8a8: BlockFolder) -> None:
    plain = executors_for("gpu", w8a8, threads=1).load(w8a8, 1, w8a8.model.blocks, pages=2)
    failing = FailingExecutor(plain, after=1, block="block_1")
    run(failing, [([5], 0, [0])])
    for _ in range(2):
        with pytest.raises(ExecutionError, match="injected GPU failure") as caught:
            run(failing, [([5], 0, [0])])
        assert caught.value.block == "block_1"
