"""The contract of `Executor`, checked on every implementation and on the wrappers that inject faults."""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from _pytest.mark import ParameterSet
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import ExecutionError
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.cpu.loading import CpuExecutors
from blockrelay_worker.execution.cpu.shared_loading import SharedExecutors
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.fault_injection import SaltedExecutor, SlowedExecutor, salted_id
from blockrelay_worker.execution.loader import Executors, executors_for
from blockrelay_worker.execution.numerics_id import numerics_id
from blockrelay_worker.execution.onnx.loading import OnnxExecutors
from blockrelay_worker.execution.onnx.providers.opening import open_provider
from blockrelay_worker.execution.process.executors import DeviceExecutors, Gpu
from tests.support.worker.failing_gpu import FailingExecutor

PAGES = 8
PROMPT = list(range(5, 45))
#: Of logits up to 16 in float32, computed in another order: ten spacings of such numbers, twice what was measured.
FLOAT_ERROR = 2e-5
#: The same in float16: six spacings of such numbers, twice what was measured.
HALF_ERROR = 0.1
#: The same behind keys and values that were rounded to float16 once, by 2**-11 at most; 4e-3 was measured.
PAGE_ERROR = 16 * 2**-10
Wrap = Callable[[Executor, BlockFolder], Executor]
WRAPS: dict[str, Wrap] = {
    "plain": lambda executor, folder: executor,
    "failing": lambda executor, folder: FailingExecutor(executor, after=100, block="block_1"),
    "slowed": lambda executor, folder: SlowedExecutor(executor, speed=0.5),
    "salted": lambda executor, folder: SaltedExecutor(executor, salt="x", vocabulary=folder.model.vocab_size),
}


FOLDERS = ("w8a8", "w4a8", "fp32", "fp16", "mixed_exact", "mixed")


#: (kind, what is in front) -> the folders that the quick suite has; the thorough one has the others.
QUICK = defaultdict[tuple[str, str], Sequence[str]](
    lambda: ("w8a8",),
    {
        ("kernels", "plain"): FOLDERS,
        ("onnx", "plain"): ("w8a8", "fp16", "mixed"),
        ("webgpu", "plain"): FOLDERS,
        ("webgpu_float16", "plain"): FOLDERS,
    },
)


@functools.cache  # what it asks a device is asked once, and the answers that it compares it with are made once
def onnx(device: str) -> OnnxExecutors:
    return OnnxExecutors(open_provider(device))


@pytest.fixture
def processes_may_stay() -> bool:
    """Those of devices, until the last test."""
    return True


@pytest.fixture(scope="module")
def device_processes() -> Iterator[dict[Path, DeviceExecutors]]:
    """One for each folder, by its path."""
    begun: dict[Path, DeviceExecutors] = {}
    yield begun
    for executors in begun.values():
        executors.close()


def in_a_process(folder: BlockFolder, begun: dict[Path, DeviceExecutors]) -> DeviceExecutors:
    if folder.root not in begun:
        begun[folder.root] = DeviceExecutors(folder, Gpu("cpu", 60))
    return begun[folder.root]


#: By the device that stages are loaded to.
KINDS: dict[str, Callable[[BlockFolder, dict[Path, DeviceExecutors]], Executors | OnnxExecutors]] = {
    "kernels": lambda folder, begun: CpuExecutors(1),
    "ranks": lambda folder, begun: SharedExecutors(folder, ranks=2, threads=1),
    "onnx": lambda folder, begun: onnx("cpu"),
    "process": in_a_process,
    "webgpu": lambda folder, begun: onnx("webgpu:0"),
    "webgpu_float16": lambda folder, begun: onnx("webgpu:0"),
}
#: Which folders show all there is of it, and its marks. Weights are the business of test_small_weights.
ON_DEVICES: dict[str, tuple[Sequence[str], Sequence[pytest.MarkDecorator]]] = {
    "ranks": (("w8a8", "w4a8", "mixed_exact"), ()),
    "process": (FOLDERS, ()),
    "webgpu": (("fp32", "w8a8"), (pytest.mark.software_gpu,)),
    "webgpu_float16": (("fp16",), (pytest.mark.software_gpu, pytest.mark.float16)),
}


@pytest.fixture(params=[pytest.param(kind, marks=ON_DEVICES.get(kind, ((), ()))[1]) for kind in KINDS])
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of executor that runs the stages."""
    return request.param


def cases() -> Iterator[ParameterSet]:
    """What runs the stages, what is in front of it (of those on devices nothing), and the folder."""
    for kind in KINDS:
        folders, marks = ON_DEVICES.get(kind, (FOLDERS, ()))
        for folder in folders:
            for wrap in ["plain"] if kind in ON_DEVICES else WRAPS:
                # What is in front of an executor knows nothing of precisions; what moves batches to a process neither.
                rest = [] if folder in QUICK[kind, wrap] else [pytest.mark.thorough]
                yield pytest.param((kind, wrap, folder), marks=[*marks, *rest], id=f"{folder}-{kind}-{wrap}")


@pytest.fixture(params=cases())
def case(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    """One of `cases`."""
    return request.param


@pytest.fixture
def folder(request: pytest.FixtureRequest, case: tuple[str, str, str]) -> BlockFolder:
    return request.getfixturevalue(case[2])


@pytest.fixture(scope="module")
def kept() -> dict[tuple[str, Path, int, int], list[Executor]]:
    """Stages on WebGPU, which take seconds to load: every test but the first finds what the ones before left behind."""
    return {}


@pytest.fixture
def load(
    case: tuple[str, str, str],
    folder: BlockFolder,
    device_processes: dict[Path, DeviceExecutors],
    kept: dict[tuple[str, Path, int, int], list[Executor]],
    request: pytest.FixtureRequest,
) -> Callable[[int, int], Executor]:
    """Loads blocks first to last, as often as asked."""
    kind, wrap, _ = case
    executors, given = KINDS[kind](folder, device_processes), Counter[tuple[int, int]]()

    def one(first: int, last: int) -> Executor:
        if not kind.startswith("webgpu"):
            executor = executors.load(folder, first, last, pages=PAGES)
            if kind == "ranks":
                request.addfinalizer(executor.close)
            return WRAPS[wrap](executor, folder)
        stages = kept.setdefault((kind, folder.root, first, last), [])
        given[first, last] += 1
        if len(stages) < given[first, last]:
            stages.append(executors.load(folder, first, last, pages=PAGES))
        return stages[given[first, last] - 1]

    return one


def assert_alike(executor: Executor, found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """Logits or rows that the executor has computed in two ways: equal bits, or the floats that are promised."""
    if executor.capabilities.exact:
        assert found.tobytes() == expected.tobytes()
    else:
        half = executor.details.get("dtype") == "float16"
        np.testing.assert_allclose(found, expected, rtol=0, atol=HALF_ERROR if half else FLOAT_ERROR)


def run(
    executor: Executor,
    parts: Sequence[tuple[Sequence[int], int, Sequence[int]]],
    hidden: NDArray[np.float32] | None = None,
    wanted: Sequence[int] | None = None,
) -> NDArray[np.float32]:
    """The rows or (of all rows, or those `wanted`) logits, copied, of a batch of (tokens, first position, pages)."""
    tokens = np.array([token for part, _, _ in parts for token in part], np.int32)
    output = executor.run(
        Batch(
            segments=[Segment(rows=len(part), first_position=first, pages=pages) for part, first, pages in parts],
            tokens=tokens if executor.takes_tokens else None,
            hidden=hidden,
            wanted=(range(len(tokens)) if wanted is None else wanted) if executor.gives_logits else (),
        )
    )
    assert output.not_finite == () and (output.hidden is None) == executor.gives_logits
    result = output.logits if output.hidden is None else output.hidden
    assert result is not None
    return result.copy()


def test_it_says_what_it_can_do(folder: BlockFolder, load: Callable[[int, int], Executor]) -> None:
    executor = load(1, folder.model.blocks)
    able = executor.capabilities
    assert able.precision == folder.manifest.precision
    own = executors_for(folder, threads=1).numerics_id(folder.manifest)
    assert own == numerics_id(folder.manifest)
    if able.numerics_id in (own, salted_id(own, "x")):
        assert able.exact == folder.manifest.exact
    else:
        assert not able.exact, "the bits of a CPU are the only ones that are promised"
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
    assert_alike(one, beside, alone)


def test_drafts_that_are_rejected_leave_nothing(folder: BlockFolder, load: Callable[[int, int], Executor]) -> None:
    # Given a request that never had drafts, and one whose last token goes with three of them, all four rows wanted
    executor = load(1, folder.model.blocks)
    alone = run(executor, [(PROMPT, 0, [0, 1, 2])])
    run(executor, [(PROMPT[:14], 0, [6, 4, 3])], wanted=[])
    drafted = run(executor, [([9], 0, [7]), ([*PROMPT[14:16], 400, 401], 14, [6, 4, 3])], wanted=[1, 2, 3, 4])
    # Then the right ones have their logits, and the wrong ones are written over
    assert_alike(executor, drafted[:2], alone[14:16])
    assert_alike(executor, run(executor, [(PROMPT[16:], 16, [6, 4, 3])]), alone[16:])


def test_whose_logits_are_wanted_does_not_show(folder: BlockFolder, load: Callable[[int, int], Executor]) -> None:
    executor = load(1, folder.model.blocks)
    alone = run(executor, [(PROMPT, 0, [0, 1, 2])])
    # Given a batch of which nobody wants any, then one of which some are wanted
    assert run(executor, [(PROMPT[:20], 0, [3, 4, 5]), ([7, 7], 0, [6])], wanted=[]).shape == (0, alone.shape[1])
    some = run(executor, [([8], 2, [6]), (PROMPT[20:], 20, [3, 4, 5])], wanted=[0, 1, 20])
    assert_alike(executor, some[1:], alone[[20, 39]])


def test_pages_of_a_common_beginning_serve_two_at_once(
    folder: BlockFolder, load: Callable[[int, int], Executor]
) -> None:
    executor = load(1, folder.model.blocks)
    alone = run(executor, [(PROMPT, 0, [0, 1, 2])])
    both = run(executor, [(PROMPT[16:], 16, [0, 5, 6]), (PROMPT[16:19], 16, [0, 3])])
    assert_alike(executor, both, np.concatenate([alone[16:], alone[16:19]]))


def test_pages_move_to_another_executor_and_the_next_logits_are_the_same(
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
        stayed, moved = run(here, [(token, position, [2, 0, 5])]), run(there, [(token, position, [4, 7, 0])])
        # What computes in the type of the pages rounds nothing as they leave.
        if here.capabilities.exact or here.details.get("dtype", "float32") == np.dtype(here.layout.dtype):
            assert_alike(here, moved, stayed)
        else:
            np.testing.assert_allclose(moved, stayed, rtol=0, atol=PAGE_ERROR)
    assert_alike(there, run(there, [(PROMPT[19:20], 16, [1, 2])]), neighbour[-1:])


def test_pages_come_back_as_they_went(folder: BlockFolder, load: Callable[[int, int], Executor]) -> None:
    here, there = load(1, 2), load(1, 2)
    run(here, [(PROMPT[:32], 0, [3, 1])])
    exported = [[(k.copy(), v.copy()) for k, v in content] for content in here.export_pages([1, 3])]
    there.import_pages([6, 0], exported)
    for content, again in zip(exported, there.export_pages([6, 0]), strict=True):
        for halves in zip(content, again, strict=True):
            assert all(one.any() and one.tobytes() == two.tobytes() for one, two in zip(*halves, strict=True))


def test_a_row_that_is_not_finite_fails_its_request_and_no_other_not_even_afterwards(
    folder: BlockFolder, load: Callable[[int, int], Executor]
) -> None:
    # Given three requests between two stages, one of which has overflowed
    executor = load(2, folder.model.blocks)
    rows = np.random.default_rng(2).normal(size=(6, folder.model.hidden_size)).astype(np.float32)
    segments = [Segment(rows=2, first_position=0, pages=[page]) for page in (1, 0, 2)]
    clean = executor.run(Batch(segments=segments, hidden=rows, wanted=range(6))).logits
    assert clean is not None
    clean = clean.copy()
    bad = rows.copy()
    bad[2, 7], bad[3] = np.inf, np.nan
    # When they run together, then that one is named, and its logits alone are rubbish
    output = executor.run(Batch(segments=segments, hidden=bad, wanted=range(6)))
    assert output.not_finite == (1,) and output.logits is not None
    assert_alike(executor, output.logits[[0, 1, 4, 5]].copy(), clean[[0, 1, 4, 5]])
    # And though nobody wants its logits it is named
    assert executor.run(Batch(segments=segments, hidden=bad, wanted=[])).not_finite == (1,)
    # When its page has another owner, whose rows fill a part of it, then the rubbish behind them does not show
    after = executor.run(
        Batch(
            segments=[Segment(rows=1, first_position=0, pages=[0]), Segment(rows=18, first_position=0, pages=[4, 5])],
            hidden=np.concatenate([rows[:1], np.repeat(rows[:1], 18, axis=0)]),
            wanted=[0, 1],
        )
    )
    assert after.not_finite == () and after.logits is not None
    assert_alike(executor, after.logits.copy(), clean[[0, 0]])


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


@pytest.mark.parametrize(
    ("segment", "tokens", "complaint"),
    [
        (Segment(rows=1, first_position=512, pages=list(range(8)) * 5), [5], "positions 512"),
        (Segment(rows=4, first_position=0, pages=[]), [5] * 4, "0 pages do not reach position 3"),
        (Segment(rows=1, first_position=0, pages=[PAGES]), [5], "page id"),
        (Segment(rows=1, first_position=0, pages=[0]), [512], "token id"),
        (Segment(rows=1, first_position=0, pages=[0]), [5, 6], "1 token ids"),
    ],
)
def test_a_batch_that_makes_no_sense_is_refused_and_the_next_one_is_not(
    w8a8: BlockFolder,
    kind: str,
    device_processes: dict[Path, DeviceExecutors],
    segment: Segment,
    tokens: list[int],
    complaint: str,
) -> None:
    executor = KINDS[kind](w8a8, device_processes).load(w8a8, 1, 1, pages=PAGES)
    with pytest.raises(ExecutionError, match=complaint):
        executor.run(Batch(segments=[segment], tokens=np.array(tokens, np.int32), wanted=[0]))
    assert run(executor, [(PROMPT[:4], 0, [0])]).shape == (4, w8a8.model.hidden_size)
    executor.close()


def test_a_fault_that_was_asked_for_comes_after_so_many_batches(w8a8: BlockFolder) -> None:
    plain = executors_for(w8a8, threads=1).load(w8a8, 1, w8a8.model.blocks, pages=2)
    failing = FailingExecutor(plain, after=1, block="block_1")
    run(failing, [([5], 0, [0])])
    for _ in range(2):
        with pytest.raises(ExecutionError, match="injected GPU failure") as caught:
            run(failing, [([5], 0, [0])])
        assert caught.value.block == "block_1"
