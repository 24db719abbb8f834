"""Equal numerics ids promise equal bits, and what cannot change a bit does not change the id."""

import platform

import onnxruntime as ort
import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay_worker.execution import numerics_id as module
from blockrelay_worker.execution.numerics_id import numerics_id


@pytest.fixture(params=["w8a8", "w4a8", "mixed_exact", "mixed", "fp32"])
def folder(request: pytest.FixtureRequest) -> BlockFolder:
    return request.getfixturevalue(request.param)


def test_another_onnx_runtime_changes_the_id_of_floats_alone(
    folder: BlockFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = numerics_id(folder.manifest)
    monkeypatch.setattr(ort, "__version__", "99.0")
    assert (numerics_id(folder.manifest) == before) == folder.manifest.exact


def test_other_kernels_or_another_sampler_change_every_id(folder: BlockFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = {numerics_id(folder.manifest)}
    for name in ("KERNEL_NUMERICS_VERSION", "SAMPLER_VERSION", "PAGE_LAYOUT"):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, "another")
            ids.add(numerics_id(folder.manifest))
    assert len(ids) == 4


def test_arm_shares_the_ids_of_exact_precisions_alone(folder: BlockFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    ids: dict[str, str] = {}
    for machine in ("x86_64", "AMD64", "aarch64", "arm64", "riscv64"):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        ids[machine] = numerics_id(folder.manifest)
    assert ids["x86_64"] == ids["AMD64"] != ids["riscv64"]
    assert (ids["aarch64"] == ids["x86_64"]) == (ids["arm64"] == ids["x86_64"]) == folder.manifest.exact
