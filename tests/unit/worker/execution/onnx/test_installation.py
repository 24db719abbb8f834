"""One ONNX Runtime in one environment."""

import os
import subprocess
import sys
from importlib.metadata import PathDistribution, distributions
from pathlib import Path

import pytest

from blockrelay.errors import UsageError
from blockrelay_worker.execution.onnx.installation import check_one_onnxruntime


def install(site: Path, name: str, file: str) -> None:
    """What pip leaves of a distribution with one file."""
    folder = site / f"{name.replace('-', '_')}-1.31.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.31.1\n")
    (folder / "RECORD").write_text(f"{file},,\n")


def test_one_and_its_plugins_are_good(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime-gpu", "onnxruntime/__init__.py")
    install(tmp_path, "onnxruntime-ep-webgpu", "onnxruntime_ep_webgpu/__init__.py")
    install(tmp_path, "numpy", "numpy/__init__.py")
    check_one_onnxruntime(distributions(path=[str(tmp_path)]))


def test_two_are_named(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime", "onnxruntime/__init__.py")
    install(tmp_path, "onnxruntime-gpu", "onnxruntime/__init__.py")
    with pytest.raises(UsageError, match="onnxruntime and onnxruntime-gpu are installed in one environment"):
        check_one_onnxruntime(distributions(path=[str(tmp_path)]))


def test_the_command_ends_with_2_beside_a_second_one(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime-directml", "onnxruntime/__init__.py")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-m", "blockrelay_worker.offline.devices"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("blockrelay: onnxruntime and onnxruntime-directml are installed in one environment")


def test_nothing_else_that_is_installed_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many distributions: the metadata of all take long, and every device asks."""
    install(tmp_path, "onnxruntime", "onnxruntime/__init__.py")
    install(tmp_path, "numpy", "numpy/__init__.py")
    read: list[str] = []
    ask = PathDistribution.read_text

    def heard(one: PathDistribution, name: str | os.PathLike[str]) -> str | None:
        text = ask(one, name)
        read.append(text or "")
        return text

    monkeypatch.setattr(PathDistribution, "read_text", heard)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    check_one_onnxruntime()
    assert any("Name: onnxruntime" in text for text in read) and not any("Name: numpy" in text for text in read)
    install(tmp_path, "onnxruntime-gpu", "onnxruntime/__init__.py")
    with pytest.raises(UsageError, match="onnxruntime and onnxruntime-gpu"):
        check_one_onnxruntime()
