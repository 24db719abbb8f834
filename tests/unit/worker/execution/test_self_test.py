"""A worker proves every block before it serves it."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import KnownAnswerMismatch
from blockrelay_worker.execution.cpu import linears
from blockrelay_worker.execution.cpu.loading import load_stage
from blockrelay_worker.execution.cpu.stage import StageExecutor
from blockrelay_worker.execution.numerics_id import numerics_id
from blockrelay_worker.execution.self_test import fixed_rows, fixed_tokens, known_answers
from blockrelay_worker.kernels import load_kernels, supported_isas
from blockrelay_worker.kernels.arguments import F16, U8
from blockrelay_worker.kernels.interface import Linear
from blockrelay_worker.kernels.matmuls import PackedMatmul
from blockrelay_worker.kernels.native import NativeKernels


def _load(folder: BlockFolder, first: int, last: int, threads: int = 1) -> StageExecutor:
    executor = load_stage(folder, first, last, pages=4, threads=threads, kernels=load_kernels(threads))
    assert executor.pool.free_pages == 4
    return executor


def _with_answer(folder: BlockFolder, block: int, answer: str) -> BlockFolder:
    blocks = list(folder.manifest.blocks)
    blocks[block - 1] = replace(blocks[block - 1], known_answer=answer)
    return replace(folder, manifest=replace(folder.manifest, blocks=tuple(blocks)))


@pytest.fixture(params=["w8a8", "w4a8"])
def exact(request: pytest.FixtureRequest) -> BlockFolder:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(("first", "last", "threads"), [(1, 5, 1), (2, 3, 2), (5, 5, 1)])
def test_a_good_stage_loads(exact: BlockFolder, first: int, last: int, threads: int) -> None:
    assert _load(exact, first, last, threads).backend in ("native", "u8s8", "u8u8")


@pytest.mark.parametrize("kernels", ["reference", *supported_isas()])
def test_groups_of_weights_give_their_answers_on_every_level_and_without_a_compiler(
    w4a8: BlockFolder, kernels: str
) -> None:
    load_stage(w4a8, 1, 5, pages=4, threads=1, kernels=load_kernels(1, isa=kernels))


@pytest.mark.skipif(not supported_isas(), reason="no native kernels were built")
def test_wrong_sums_of_groups_are_refused(w4a8: BlockFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    right = NativeKernels.group_matmul

    def wrong(self: NativeKernels, q4: U8, gs: F16, gm: F16) -> Linear:
        other = gm.copy()
        other[0, 0] += np.spacing(other[0, 0])
        return right(self, q4, gs, other)

    monkeypatch.setattr(NativeKernels, "group_matmul", wrong)
    with pytest.raises(KnownAnswerMismatch, match=r"block_2 of .* on this CPU"):
        _load(w4a8, 2, 4)


def test_the_slower_products_are_taken_when_the_fast_ones_are_wrong(
    w8a8: BlockFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a CPU on which uint8 x int8 saturates: the fast graph computes something else
    right = linears.OrtLinear.__call__

    def saturating(self: linears.OrtLinear, rows: np.ndarray, out: np.ndarray) -> None:
        right(self, rows, out)
        if self.weight_type == np.int8:
            np.minimum(out, 1.0, out=out)

    def wrong(self: PackedMatmul, rows: np.ndarray, out: np.ndarray) -> None:
        out.fill(1)

    monkeypatch.setattr(linears.OrtLinear, "__call__", saturating)
    monkeypatch.setattr(PackedMatmul, "__call__", wrong)
    assert _load(w8a8, 1, 5).backend == "u8u8"


def test_a_block_that_computes_other_bits_is_refused_by_name(w8a8: BlockFolder) -> None:
    folder = _with_answer(w8a8, 3, "0" * 64)
    _load(folder, 4, 5)
    with pytest.raises(KnownAnswerMismatch, match=r"block_3 of .* on this CPU") as caught:
        _load(folder, 2, 5)
    assert caught.value.block == "block_3"


def test_float32_has_no_known_answers_and_loads(fp32: BlockFolder) -> None:
    _load(fp32, 1, 5)


def test_of_a_mixed_folder_the_blocks_that_are_exact_have_answers_and_give_them(mixed: BlockFolder) -> None:
    answered = [block.known_answer is not None for block in mixed.manifest.blocks]
    assert answered == [True, False, True, True, False]
    assert not mixed.manifest.exact
    _load(mixed, 1, 5)
    with pytest.raises(KnownAnswerMismatch, match=r"block_4 of .* on this CPU"):
        _load(_with_answer(mixed, 4, "0" * 64), 1, 5)


def test_a_block_answers_the_same_whatever_precision_the_others_have(
    w8a8: BlockFolder, w4a8: BlockFolder, mixed: BlockFolder, mixed_exact: BlockFolder
) -> None:
    assert w8a8.manifest.basis == mixed_exact.manifest.basis != w4a8.manifest.basis == mixed.manifest.basis

    def answers(folder: BlockFolder) -> list[str | None]:
        return [block.known_answer for block in folder.manifest.blocks]

    eight, four = answers(w8a8), answers(w4a8)
    assert [answers(mixed_exact)[index] for index in (0, 3, 4)] == [eight[0], eight[3], eight[4]]
    assert answers(mixed)[3] == four[3]


def test_the_command_prints_the_answers_that_the_folder_holds(exact: BlockFolder) -> None:
    command = [sys.executable, "-m", "blockrelay_worker.execution.self_test", str(exact.root)]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    expected = [(block.name, block.known_answer) for block in exact.manifest.blocks]
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{name: found} for name, found in expected]
    assert list(known_answers(exact)) == expected


def test_the_command_refuses_a_folder_that_is_none(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "blockrelay_worker.execution.self_test", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert done.returncode == 2
    assert "manifest.json" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_fixed_input_reaches_every_quantisation_level(w8a8: BlockFolder) -> None:
    u, _ = load_kernels(1).quantise(fixed_rows(w8a8.model))
    assert set(u.ravel().tolist()) >= set(range(2, 255))
    assert u.min() == 1 or u.max() == 255
    tokens = fixed_tokens(w8a8.model)
    assert tokens.shape == (17,)
    assert 0 <= tokens.min() <= tokens.max() < w8a8.model.vocab_size


def test_the_numerics_id_tells_precisions_and_graphs_apart(
    w8a8: BlockFolder,
    w4a8: BlockFolder,
    fp32: BlockFolder,
    fp16: BlockFolder,
    mixed: BlockFolder,
    mixed_exact: BlockFolder,
) -> None:
    assert numerics_id(w8a8.manifest).startswith("w8a8-")
    assert numerics_id(mixed.manifest).startswith("mixed-")
    assert numerics_id(mixed_exact.manifest).startswith("mixed-")
    assert numerics_id(mixed.manifest) != numerics_id(mixed_exact.manifest)
    assert numerics_id(w4a8.manifest).startswith("w4a8-")
    assert numerics_id(fp32.manifest).startswith("fp32-")
    assert numerics_id(fp16.manifest).startswith("fp16-")
    changed = dict(w8a8.manifest.files)
    changed["rotary.bin"] = replace(changed["rotary.bin"], sha256="0" * 64)
    assert numerics_id(replace(w8a8.manifest, files=changed)) != numerics_id(w8a8.manifest)
