"""A recorded program gives the results of the same calls made one by one, however often it runs."""

import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from blockrelay.errors import ExecutionError
from blockrelay_worker.kernels import Kernels, load_kernels, supported_isas
from blockrelay_worker.kernels.recorded import Direct
from tests.support.worker.kernel_cases import floats

pytestmark = pytest.mark.skipif(not supported_isas(), reason="no native kernels were built")


@pytest.fixture(params=[(name, threads) for name in supported_isas() for threads in (1, 2)], ids=str)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    name, threads = request.param
    return load_kernels(threads, isa=name)


class Buffers:
    """What the two parts below work on."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.x, self.weight = floats(rng, 4, 100), floats(rng, 100)
        self.q4 = rng.integers(0, 256, (48, 7), np.uint8)
        self.gs, self.gm = floats(rng, 2, 3, 7, spread=0).astype(np.float16)
        self.u, self.scale, self.twice = np.zeros((4, 96), np.uint8), np.zeros((4, 3), np.float32), floats(rng, 4)
        self.out = np.zeros((4, 7), np.float32)

    def parts(self, kernels: Kernels) -> list[Callable[[], None]]:
        """Rows of a norm, quantised in groups, then their product, scaled."""
        normed = np.zeros((4, 100), np.float32)
        product = kernels.group_matmul(self.q4, self.gs, self.gm)

        def first() -> None:
            kernels.norm(self.x, self.weight, 1e-5, out=normed)
            kernels.quantise(normed.reshape(-1)[:384].reshape(4, 96), group=32, u=self.u, scale=self.scale)

        def second() -> None:
            product(self.u, self.out, self.scale)
            kernels.scale_rows(self.out, self.twice)

        return [first, second]


def test_a_program_gives_the_bits_of_its_calls_each_time_it_runs(kernels: Kernels) -> None:
    one, other = Buffers(0), Buffers(0)
    direct, recorded = Direct(one.parts(kernels)), kernels.record(other.parts(kernels))
    assert not other.out.any(), "recording computes nothing"
    for seed in range(3):
        for buffers in (one, other):
            buffers.x[...] = Buffers(seed).x
        for program in (direct, recorded):
            seconds: list[float] = []
            program.run(seconds)
            assert len(seconds) == 2 and min(seconds) > 0
        assert one.out.any()
        assert one.out.tobytes() == other.out.tobytes()


def test_a_program_keeps_what_it_works_on(kernels: Kernels) -> None:
    one, other = Buffers(1), Buffers(1)
    Direct(one.parts(kernels)).run([])
    program, out = kernels.record(other.parts(kernels)), other.out
    del other
    np.full(100_000, 3.0)  # may lie where a freed buffer lay
    program.run([])
    assert out.tobytes() == one.out.tobytes()


def test_wrong_arguments_are_errors_when_a_program_is_recorded(kernels: Kernels) -> None:
    x = np.zeros((2, 8), np.float32)
    with pytest.raises(ExecutionError, match="argument row_scale"):
        kernels.record([partial(kernels.scale_rows, x, np.zeros(3, np.float32))])
    # Then calls are calls again
    x += 1
    kernels.scale_rows(x, np.full(2, 2, np.float32))
    assert (x == 2).all()


def test_a_wrong_index_ends_a_run_at_its_part_and_the_next_run_is_sound(kernels: Kernels) -> None:
    x, table = np.ones((1, 24), np.float32), np.ones((5, 4), np.float32)
    k_pages, v_pages = np.zeros((3, 1, 8, 16), np.float16), np.zeros((3, 1, 16, 8), np.float16)
    position, page, slot = np.array([[1], [2], [0]], np.int32)
    out = np.zeros((1, 1, 8), np.float32)

    def turn() -> None:
        kernels.rotary_append(
            x, None, None, None, None, 1e-6, table, table, position, page, slot, k_pages, v_pages, out=out
        )

    double = partial(kernels.scale_rows, x, np.full(1, 2, np.float32))
    program = kernels.record([double, turn, double])
    page[0] = 3
    seconds: list[float] = []
    with pytest.raises(ExecutionError, match=r"argument page: row 0 has 3, outside 0\.\.2"):
        program.run(seconds)
    assert len(seconds) == 1 and (x == 2).all() and not out.any()
    page[0] = 2
    program.run(seconds)
    assert len(seconds) == 4 and (x == 8).all() and k_pages[2].any()


def test_calls_of_another_thread_are_made_while_this_one_records(kernels: Kernels) -> None:
    mine, other = np.ones((1, 8), np.float32), np.ones((1, 8), np.float32)
    twice = np.array([2], np.float32)

    def part() -> None:
        beside = threading.Thread(target=kernels.scale_rows, args=(other, twice))
        beside.start()
        kernels.scale_rows(mine, twice)
        beside.join()

    program = kernels.record([part])
    assert np.all(other == 2) and np.all(mine == 1)
    program.run([])
    assert np.all(other == 2) and np.all(mine == 2), "the program has the calls of its own thread alone"
