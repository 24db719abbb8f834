"""Matmuls with AMX tiles: by stand-ins of their instructions where the CPU has none, and what such a CPU does."""

import logging
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from blockrelay_worker.execution.cpu.exact_linears import ExactLinear
from blockrelay_worker.kernels import native
from blockrelay_worker.kernels.libraries import TILES, Library, cpu_features, library, look, tiles_work
from blockrelay_worker.kernels.native import NO_TILES, NativeKernels, settle_tiles
from tests.support.project import ROOT
from tests.support.worker.kernel_cases import same_bits

SOURCE = ROOT / "services/worker/native/amx.cpp"
FLAGS = ("-std=c++17", "-O1", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
VNNI = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-mavx512vnni")
INSTALLED = library("amx").path
compiled = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def build(source: Path, to: Path, *flags: str) -> Path:
    subprocess.run(["g++", *FLAGS, *flags, str(source), "-o", str(to)], check=True, stderr=subprocess.DEVNULL)
    return to


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The variant `amx`, whose tiles are arrays."""
    if "avx512vnni" not in native.supported_isas():
        pytest.skip("what is beside the tiles needs AVX512-VNNI")
    return build(SOURCE, tmp_path_factory.mktemp("amx") / "_amx.so", *VNNI, "-DBLOCKRELAY_TILES_STAND_IN")


@pytest.fixture
def kernels(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> NativeKernels:
    assert look(stand_in.parent, "amx") == Library(stand_in)
    monkeypatch.setattr(native, "library", lambda _: Library(stand_in))
    monkeypatch.setattr(native, "supported_isas", lambda: ("amx",))
    return NativeKernels("amx", 3)


@compiled
@pytest.mark.kernels
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tiles_from", [1, 17, NO_TILES])
@pytest.mark.parametrize(("depth", "columns"), [(64, 1), (64, 31), (128, 32), (192, 100), (320, 4096), (100, 70)])
def test_every_number_of_rows_gives_the_bits_of_the_reference(
    kernels: NativeKernels, depth: int, columns: int, tiles_from: int
) -> None:
    chance = np.random.default_rng(depth + columns)
    q = chance.integers(-128, 128, (depth, columns), np.int8)
    scale = chance.random(columns, np.float32)
    kernels.call("tiles_from", tiles_from)
    ours, theirs = kernels.matmul(q, scale), ExactLinear(q, scale)
    for rows in (1, 15, 16, 17, 31, 32, 33, 64, 200):
        u = chance.integers(0, 256, (rows, depth), np.uint8)
        left, right = (np.full((rows, columns), np.nan, np.float32) for _ in range(2))
        ours(u, left)
        theirs(u, right)
        assert same_bits(left, right), rows


@compiled
@pytest.mark.kernels
@pytest.mark.timeout(300)
def test_tiles_serve_from_the_number_of_rows_on_that_is_measured(kernels: NativeKernels) -> None:
    assert settle_tiles(kernels) == NO_TILES, "arrays that stand for tiles are slower than VNNI"


@compiled
@pytest.mark.kernels
@pytest.mark.timeout(300)
def test_tiles_that_work_pass_the_trial(stand_in: Path) -> None:
    assert tiles_work(stand_in)


@pytest.mark.skipif(INSTALLED is None, reason="this compiler knows no tiles")
def test_the_installed_tiles_are_tried_before_they_serve(caplog: pytest.LogCaptureFixture) -> None:
    assert INSTALLED is not None
    with caplog.at_level(logging.WARNING):
        there = tiles_work(INSTALLED)
    assert there == bool(cpu_features() & TILES)
    assert ("VNNI serves" in caplog.text) == (not there), "a CPU without them ends the trial by SIGILL"


@compiled
def test_a_wrong_sum_fails_the_trial(tmp_path: Path) -> None:
    (tmp_path / "wrong.cpp").write_text('extern "C" int blockrelay_try_tiles() { return 0; }\n')
    assert not tiles_work(build(tmp_path / "wrong.cpp", tmp_path / "_amx.so"))
