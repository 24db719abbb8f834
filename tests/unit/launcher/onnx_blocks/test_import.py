"""`blockrelay import` as people type it."""

import json
from pathlib import Path

import pytest

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.onnx_blocks.reports.importing import ComparedBlock, ImportResult
from blockrelay_launcher.onnx_blocks.importing import result_lines
from tests.support.altered_python import SLOW_DISK
from tests.support.models.reference_blocks import ReferenceModel, write_reference_blocks
from tests.support.models.tokenizers import byte_level
from tests.support.systems.up_process import interrupted, preferring, run_command

pytestmark = pytest.mark.onnx_blocks

RESULT = ImportResult(
    name="mine",
    family="llama",
    precision="w8a8",
    stored="fp16",
    blocks=2,
    bytes=4_000,
    compared=(ComparedBlock("block_1", {"keys": 0.25, "values": 0.01}), ComparedBlock("block_2", {"logits": 0.1})),
    cost=0.0123,
    notes=("there is no chat",),
)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what lies beside the blocks of a real export."""
    folder = write_reference_blocks(tmp_path_factory.mktemp("import") / "my-blocks", ReferenceModel(layers=2))
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "genai_config.json").write_text(
        json.dumps({"model": {"context_length": 256, "eos_token_id": [1, 2], "bos_token_id": 0}})
    )
    return folder


def test_a_folder_is_imported(blocks: Path, tmp_path: Path) -> None:
    done = run_command("import", blocks, tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    compared, *notes, last = done.stdout.splitlines()
    assert compared.startswith("compared with the originals: 3 of 3 blocks are the same; furthest off are the ")
    assert notes == []
    assert last.startswith(f"{tmp_path / 'out'}: my-blocks, llama, fp16, 3 blocks, ")
    model = open_block_folder(tmp_path / "out").model
    assert (model.max_position, model.eos_ids, model.bos_id) == (256, (1, 2), 0)
    assert open_block_folder(tmp_path / "out").chat_template() == "{{ messages[0].content }}"


def test_what_a_precision_costs_is_measured_on_a_text(blocks: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a text of some words, read byte by byte. " * 8)
    out = tmp_path / "out"
    done = run_command(
        "import", blocks, out, "--precision", "w8a8", "--text", tmp_path / "text", "--json", "--name", "mine"
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert (told["name"], told["precision"], told["stored"], told["blocks"]) == ("mine", "w8a8", "fp16", 3)
    assert (told["folder"], told["out"], told["notes"]) == (str(blocks), str(out), [])
    assert -0.2 < told["cost"] < 0.2 and told["cost"] != 0
    assert [one["block"] for one in told["compared"]] == ["block_1", "block_2", "block_3"]
    assert all(one["problem"] == "" for one in told["compared"])


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    blocks = write_reference_blocks(tmp_path / "blocks", ReferenceModel(layers=1))
    done = run_command("import", blocks, tmp_path / "out", "--precision", "w8a8")
    notes = [line for line in done.stdout.splitlines() if line.startswith("note: ")]
    assert [note.split(":")[1].split(" ")[1:3] for note in notes] == [
        ["no", "config.json"],
        ["no", "tokenizer.json"],
        ["no", "end"],
        ["what", "w8a8"],
    ]
    assert "4096 positions (--max-position N says it)" in done.stdout


def test_a_refusal_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks" / "block_1.onnx").write_bytes(b"GGUF" * 100)
    done = run_command("import", tmp_path / "blocks", tmp_path / "out", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "blockrelay: block_1.onnx: is not an ONNX file, or a part of one\n"
    assert [path.name for path in tmp_path.iterdir()] == ["blocks"]


def test_ctrl_c_ends_it_and_the_same_command_goes_on(blocks: Path, tmp_path: Path) -> None:
    """While blocks are written, to a disk that is slow."""
    out, left = tmp_path / "out", tmp_path / ".out.unfinished"
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
    begun = (left / "blocks" / "block_1.bin").exists
    ended = interrupted("import", blocks, out, when=begun, env=preferring(tmp_path))
    assert ended == (130, "", "interrupted: the same command continues from the files that are written\n")
    assert not out.exists()
    inode = (left / "blocks" / "block_1.bin").stat().st_ino
    assert run_command("import", blocks, out).returncode == 0
    assert (out / "blocks" / "block_1.bin").stat().st_ino == inode and not left.exists()


def test_people_read_what_is_furthest_off_and_what_it_costs() -> None:
    assert list(result_lines(Path("out"), RESULT)) == [
        "compared with the originals: 2 of 2 blocks are the same; furthest off are the keys of block_1, with 25.0% of "
        "what is allowed",
        "note: there is no chat",
        "w8a8 costs +1.23% of perplexity beside the weights as they were",
        "out: mine, llama, w8a8, 2 blocks, 4 kB",
    ]
