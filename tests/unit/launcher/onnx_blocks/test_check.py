"""`blockrelay check` as people type it."""

import json
import re
import sys
from pathlib import Path

import pytest

from blockrelay.extras import how_to_install
from blockrelay.onnx_blocks.blocks_file import read_blocks_file
from tests.support.altered_python import WITHOUT_ONNX
from tests.support.models.altered_blocks import altered, copied, resized
from tests.support.models.reference_blocks import ReferenceModel, write_reference_blocks
from tests.support.systems.up_process import interrupted, preferring, run_command

pytestmark = pytest.mark.onnx_blocks

BLOCKS = 33


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The names of the 33 blocks that people own, 64 wide."""
    return write_reference_blocks(tmp_path_factory.mktemp("reference") / "blocks")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer and the head."""
    return write_reference_blocks(tmp_path_factory.mktemp("small") / "blocks", ReferenceModel(layers=1))


def test_33_of_33(reference: Path, tmp_path: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in reference.iterdir()}
    done = run_command("check", reference, "--write", tmp_path / "blocks.json")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    head, *rows, step, count = done.stdout.splitlines()
    assert head.split() == ["BLOCK", "OUTPUT", "DECLARED", "ACTUAL", "DTYPE", "SECONDS", "RESULT"]
    assert count == "33 of 33"
    assert re.fullmatch(r"a step: \d+\.\d{3} s with all blocks warm, \d+\.\d{3} s with each made again", step)
    assert len(rows) == 6 + 31 * 3 + 1
    assert [row.split()[0] for row in rows if row.endswith("passed")] == [f"block_{index}" for index in range(1, 34)]
    assert "(5, 10, 512)" in rows[-1] and "logits" in rows[-1]
    listed = read_blocks_file(tmp_path / "blocks.json")
    assert [block.signature.file for block in listed] == [f"block_{index}.onnx" for index in range(1, 34)]
    assert before == {path.name: path.stat().st_mtime_ns for path in reference.iterdir()}


def test_json_has_every_tensor_as_it_is_declared_and_as_it_was(small: Path) -> None:
    done = run_command("check", small, "--json", "--batch", "2", "--sequence", "1", "--past", "3")
    assert done.returncode == 0 and done.stderr == ""
    told = json.loads(done.stdout)
    assert {name: told[name] for name in ("folder", "device", "batch", "sequence", "past", "passed", "of")} == {
        "folder": str(small),
        "device": "cpu",
        "batch": 2,
        "sequence": 1,
        "past": 3,
        "passed": 2,
        "of": 2,
    }
    first, head = told["blocks"]
    assert told["step_seconds"]["warm"] == first["seconds"] + head["seconds"] < told["step_seconds"]["one_by_one"]
    assert first["passed"] and first["seconds"] >= 0 and head["block"] == "block_2" and head["problem"] == ""
    tensors = {tensor["name"]: tensor for tensor in (*first["inputs"], *first["outputs"])}
    assert tensors["past_key_values.0.key"]["shape"] == [2, 2, 3, 16]
    assert tensors["present.0.key"] == {
        "name": "present.0.key",
        "declared_dtype": "float16",
        "declared": ["batch_size", 2, "past_sequence_length + sequence_length", 16],
        "dtype": "float16",
        "shape": [2, 2, 4, 16],
    }


def test_a_block_that_fails_is_exit_code_1_with_the_table(small: Path, tmp_path: Path) -> None:
    folder = copied(small, tmp_path / "copy", altered("block_2.onnx", lambda model: resized(model, "logits", 2, 9)))
    done = run_command("check", folder)
    assert done.returncode == 1 and done.stderr == ""
    assert done.stdout.splitlines()[-1] == "1 of 2"
    assert "the file declares (batch_size, sequence_length, 9)" in done.stdout


def test_a_folder_that_cannot_be_checked_is_one_line_and_exit_code_2(small: Path, tmp_path: Path) -> None:
    folder = copied(small, tmp_path / "copy", lambda folder: (folder / "block_1.onnx").write_bytes(b"GGUF" * 100))
    done = run_command("check", folder, "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "blockrelay: block_1.onnx: is not an ONNX file, or a part of one\n"


def test_the_last_block_is_missing(small: Path, tmp_path: Path) -> None:
    folder = copied(small, tmp_path / "copy", lambda folder: (folder / "block_2.onnx").unlink())
    done = run_command("check", folder)
    said = "blockrelay: block_1.onnx: has no output logits, and nor has another block: is the last one missing?\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_without_onnx_it_says_what_to_install(small: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_ONNX)
    done = run_command("check", small, env=preferring(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"blockrelay: onnx is not installed: {how_to_install('converter')}\n"


def test_a_python_that_is_not_there_is_one_line(small: Path, tmp_path: Path) -> None:
    done = run_command("check", small, "--gpu-python", tmp_path / "python")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--gpu-python" in done.stderr


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "has ended by SIGKILL, as it does when memory is used up"),
        ("os._exit(70)", "has ended with status 70"),
    ],
)
def test_a_worker_that_dies_leaves_a_table(small: Path, tmp_path: Path, ends: str, words: str) -> None:
    """As a driver may end it, or the system that has no memory left."""
    python = tmp_path / "python"
    begin = '{"blocks": [["block_1", "block_1.onnx"], ["block_2", "block_2.onnx"]]}'
    python.write_text(f"#!{sys.executable}\nimport os, signal\nprint('{begin}', flush=True)\n{ends}\n")
    python.chmod(0o755)
    done = run_command("check", small, "--gpu-python", python)
    assert done.returncode == 1 and done.stderr == ""
    _, first, second, count = done.stdout.splitlines()
    assert first.startswith("block_1") and first.endswith(words)
    assert second.startswith("block_2") and second.endswith("not run: the process has ended")
    assert count == "0 of 2"


def test_ctrl_c_ends_it(small: Path, tmp_path: Path) -> None:
    """While the worker is at it."""
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport time\nopen({str(tmp_path / 'began')!r}, 'w')\ntime.sleep(100)\n")
    python.chmod(0o755)
    ended = interrupted("check", small, "--gpu-python", python, when=(tmp_path / "began").exists)
    assert ended == (130, "", "interrupted: nothing was written\n")
