"""`blockrelay split` as people type it, and `blockrelay check` on what it has written."""

import json
from pathlib import Path

import pytest

from blockrelay.extras import how_to_install
from blockrelay.onnx_blocks.blocks_file import read_blocks_file
from blockrelay.onnx_blocks.reports.splitting import SplitBlock
from blockrelay_launcher.onnx_blocks.split_table import split_table
from tests.support.altered_python import SLOW_DISK, WITHOUT_ONNX
from tests.support.models.genai_decoder import genai_decoder
from tests.support.models.whole_decoders import optimum_decoder, saved
from tests.support.systems.up_process import interrupted, preferring, run_command

pytestmark = pytest.mark.onnx_blocks

BLOCK = SplitBlock(
    file="block_2.onnx", nodes=7, border=("sum", "mask"), inputs=("sum", "mask"), outputs=("end",), weight_bytes=4_000
)


def test_what_is_split_passes_the_check(tmp_path: Path) -> None:
    model, out = saved(genai_decoder(int4=True), tmp_path / "whole" / "model.onnx", external=True), tmp_path / "blocks"
    done = run_command("split", model, out)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    head, first, *_, last = done.stdout.splitlines()
    assert head.split() == ["BLOCK", "NODES", "WEIGHTS", "FROM", "EARLIER", "BLOCKS"]
    assert first.startswith("block_1.onnx")
    assert last == f"{out}: 5 blocks; weights are in the model's own files, which have a second name here"
    checked = run_command(
        "check", out, "--batch", "2", "--sequence", "1", "--past", "3", "--write", out / "blocks.json"
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.splitlines()[-1] == "5 of 5"
    assert [block.signature.index for block in read_blocks_file(out / "blocks.json")] == [1, 2, 3, 4, 5]


def test_json_has_every_block(tmp_path: Path) -> None:
    model, out = saved(optimum_decoder(), tmp_path / "whole" / "model.onnx"), tmp_path / "blocks"
    done = run_command("split", model, out, "--json")
    assert done.returncode == 0 and done.stderr == ""
    told = json.loads(done.stdout)
    assert {name: told[name] for name in ("model", "out", "weights")} == {
        "model": str(model),
        "out": str(out),
        "weights": "inside",
    }
    *_, last = told["blocks"]
    border = ["/model/layers.3/Add_1_output_0"]
    assert last.pop("weight_bytes") > 2 * 64 * 256
    assert last == {"file": "block_5.onnx", "nodes": 10, "border": border, "inputs": border, "outputs": ["logits"]}


def test_a_refusal_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    model.write_bytes(b"GGUF" * 100)
    done = run_command("split", model, tmp_path / "blocks", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "blockrelay: model.onnx: is not an ONNX file, or a part of one\n"
    assert not (tmp_path / "blocks").exists()


def test_without_onnx_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_ONNX)
    done = run_command("split", tmp_path / "model.onnx", tmp_path / "blocks", env=preferring(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"blockrelay: onnx is not installed: {how_to_install('converter')}\n"


def test_ctrl_c_ends_it_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """While weights are copied, to a disk that is slow."""
    model, out = saved(optimum_decoder(), tmp_path / "whole" / "model.onnx", external=True), tmp_path / "blocks"
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
    left = tmp_path / ".blocks.unfinished"
    begun = (left / "block_1.onnx").exists
    ended = interrupted("split", model, out, "--copy-weights", when=begun, env=preferring(tmp_path))
    assert ended == (130, "", "interrupted: the same command continues from the files that are written\n")
    assert not out.exists()
    inode = (left / "block_1.onnx").stat().st_ino
    assert run_command("split", model, out, "--copy-weights").returncode == 0
    assert (out / "block_1.onnx").stat().st_ino == inode and not left.exists()


def test_a_worker_that_is_killed_is_told(tmp_path: Path) -> None:
    site = tmp_path / "sitecustomize.py"
    site.write_text(
        "import os, signal, sys\nif 'splitting' in str(sys.orig_argv): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = run_command("split", tmp_path / "model.onnx", tmp_path / "blocks", env=preferring(tmp_path))
    assert done.returncode == 1 and done.stdout == ""
    assert "has ended by SIGKILL, as it does when memory is used up" in done.stderr


def test_the_table_has_a_line_for_each_border() -> None:
    first = SplitBlock(file="block_1.onnx", nodes=12, border=(), inputs=("input_ids",), outputs=(), weight_bytes=12)
    assert split_table([first, BLOCK]).splitlines() == [
        "BLOCK         NODES  WEIGHTS  FROM EARLIER BLOCKS",
        "block_1.onnx  12     12 B",
        "block_2.onnx  7      4 kB     sum",
        "                              mask",
    ]
