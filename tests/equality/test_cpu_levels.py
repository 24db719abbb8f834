"""Whole models give the same bits on every CPU: by all code that this one can run, and on emulated x86-64 and ARM.

Python, ONNX Runtime and the kernels run under the emulator as they are, so the choice of kernels and products by CPU is
tested too. `.ci/arm build/arm` makes the Python for ARM; without it the tests that need it are skipped.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_converter.convert import convert
from blockrelay_worker.execution.cpu.linears import Backend
from blockrelay_worker.kernels import load_kernels, supported_isas
from tests.support.models.checkpoints import Family, write_checkpoint
from tests.support.project import ARM_PYTHON
from tests.support.systems.system import OURS, StartSystem, System, make_jobs, serve
from tests.support.waiting import wait_until
from tests.support.worker.digest import logits_digest

#: CPU that qemu knows -> kernels that it must get, with their own matmuls.
LEVELS = {
    "Haswell": "avx2",
    "EPYC": "avx2",
    "SandyBridge": "baseline",  # AVX without AVX2
    "Nehalem": "baseline",
}
#: The same of ARM: Raspberry Pi 4, most servers and phones since 2018, newer servers.
ARM_LEVELS = {"cortex-a72": "baseline", "cortex-a76": "dotprod", "max": "i8mm"}
needs_arm = pytest.mark.skipif(not ARM_PYTHON.exists(), reason="needs .ci/arm build/arm")


def digest(model: Path, *options: str, python: tuple[str, ...] = (sys.executable,)) -> dict[str, Any]:
    """What `tests.support.worker.digest` says on the CPU of this command for Python."""
    command = [*python, "-m", "tests.support.worker.digest", str(model), *options]
    # Whoever tells NumPy's BLAS what this machine is (OPENBLAS_CORETYPE) does not mean the emulated one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)


@pytest.fixture(scope="module", params=["bundled", "llama", "qwen2", "qwen3", "w4a8"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, and random ones with three query heads per key head and widths that fill no register."""
    if request.param == "bundled":
        return BUNDLED_MODEL
    root, family = tmp_path_factory.mktemp("odd"), request.param
    if family == "w4a8":  # widths of whole groups of 32
        _write_odd(root / "checkpoint", "llama", hidden=160, head_dim=16, intermediate=224)
        convert(root / "checkpoint", root / "model", precision="w4a8", report=lambda *_: None)
        return root / "model"
    assert family in ("llama", "qwen2", "qwen3")
    _write_odd(root / "checkpoint", family)
    convert(root / "checkpoint", root / "model", precision="w8a8", report=lambda *_: None)
    return root / "model"


def _write_odd(path: Path, family: Family, *, hidden: int = 136, head_dim: int = 24, intermediate: int = 200) -> None:
    write_checkpoint(
        path,
        seed=9,
        family=family,
        hidden_size=hidden,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=head_dim,
        intermediate_size=intermediate,
        vocab_size=331,
    )


def test_all_kernels_and_products_of_this_cpu_give_the_same_logits(model: Path) -> None:
    folder = open_block_folder(model)
    found: dict[str, str] = {}
    for name in supported_isas():
        products: list[Backend] = ["u8s8", "u8u8", "native"]  # the first is wrong on some CPUs, and loading says so
        for kind in products if load_kernels(1, isa=name).has_matmul else products[:2]:
            found[f"{name}, {kind}"] = logits_digest(folder, stages=2, threads=2, kernels_named=name, products=kind)[2]
    chosen, products_chosen, digest_of_this_cpu = logits_digest(folder, stages=1, threads=1)
    if products_chosen == "u8u8":
        found = {names: digest for names, digest in found.items() if not names.endswith("u8s8")}
    assert set(found.values()) == {digest_of_this_cpu}, (chosen, found)


@pytest.mark.emulated
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs qemu-x86_64 (qemu-user)")
def test_emulated_cpus_give_the_logits_and_tokens_of_this_one(model: Path) -> None:
    here = digest(model)
    assert digest(model, "3", "2") == here, "stages and threads show"
    for cpu, kernels in LEVELS.items():
        _assert_same(digest(model, python=("qemu-x86_64", "-cpu", cpu, sys.executable)), here, kernels=kernels)


@pytest.mark.emulated
@pytest.mark.timeout(600)
@needs_arm
def test_emulated_arm_cpus_give_the_logits_and_tokens_of_this_one(model: Path) -> None:
    here = digest(model)
    for cpu, kernels in ARM_LEVELS.items():
        _assert_same(digest(model, python=(str(ARM_PYTHON), cpu)), here, kernels=kernels)


def _assert_same(there: dict[str, Any], here: dict[str, Any], *, kernels: str) -> None:
    same = ("numerics", "logits", "tokens")
    assert {name: there[name] for name in same} == {name: here[name] for name in same}, kernels
    assert (there["kernels"], there["products"]) == (kernels, "native")


def ready(system: System) -> int:
    return sum(worker.ready for worker in system.infos())


@pytest.mark.emulated
@pytest.mark.timeout(600)
@needs_arm
@pytest.mark.parametrize("arm_stage", [1, 2])
def test_an_emulated_arm_worker_and_a_native_one_serve_one_request_together(
    start_system: StartSystem, arm_stage: int
) -> None:
    system = start_system(stages=2, replicas=0, scheduler=False)
    system.start_scheduler()
    for stage in (1, 2):  # the first worker gets the first stage
        system.command = (str(ARM_PYTHON), "cortex-a76", "-m") if stage == arm_stage else OURS
        system.start_worker()
        wait_until(lambda workers=stage: ready(system) == workers, "the worker is ready", timeout_s=120)
    system.wait_ready(2)
    serve(system, make_jobs(8, seed=46, vocab=system.block_folder.model.vocab_size))
