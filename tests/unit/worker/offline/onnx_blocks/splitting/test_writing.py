"""What is written where, and how a run goes on with what an earlier one has left."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from onnx import ModelProto

from blockrelay.host.unfinished_folder import unfinished_folder
from blockrelay_worker.offline.onnx_blocks.folder import open_onnx_folder
from blockrelay_worker.offline.onnx_blocks.splitting.split import run
from blockrelay_worker.offline.onnx_blocks.splitting.weights import copy_file
from tests.support.full_disk import no_room
from tests.support.models.altered_blocks import altered
from tests.support.models.genai_decoder import genai_decoder
from tests.support.models.run_onnx import blocks, requests, whole
from tests.support.models.whole_decoders import SMALL, optimum_decoder, saved

_MODULE = "blockrelay_worker.offline.onnx_blocks.splitting.split"
_TABLE = "model.embed_tokens.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """With weights beside it."""
    return saved(optimum_decoder(float32=True), tmp_path / "whole" / "model.onnx", external=True)


def told(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def equal(model: Path, out: Path) -> bool:
    (request,) = requests((5,), batch=1, vocabulary=SMALL.vocabulary)
    return whole(model).step(request)["logits"].tobytes() == blocks(out).step(request)["logits"].tobytes()


def test_weights_stay_in_their_file_which_has_a_second_name(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "out"
    assert run([str(model), str(out)]) == 0
    begin, *written = told(capsys)
    assert begin["weights"] == "linked"
    assert os.path.samefile(model.parent / "model.onnx_data", out / "model.onnx_data")
    assert sorted(path.name for path in out.iterdir()) == [
        *(f"block_{index}.onnx" for index in range(1, 6)),
        "model.onnx_data",
    ]
    assert [one["file"] for one in written] == [f"block_{index}.onnx" for index in range(1, 6)]
    assert open_onnx_folder(out).wiring.presents
    assert not [path for path in out.parent.iterdir() if path != out]


def test_weights_of_another_file_system_are_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        if os.stat(elsewhere).st_dev == tmp_path.stat().st_dev:
            pytest.skip("needs two file systems")
        path = saved(optimum_decoder(float32=True), Path(elsewhere) / "model.onnx", external=True)
        assert run([str(path), str(tmp_path / "out")]) == 0
        begin, *_ = told(capsys)
        assert begin["weights"] == "copied"
        assert (tmp_path / "out" / "model.onnx_data").read_bytes() == (path.parent / "model.onnx_data").read_bytes()
        assert equal(path, tmp_path / "out")


def test_a_block_with_its_own_weights_has_what_it_reads_and_no_more(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(["--copy-weights", str(model), str(out)]) == 0
    assert told(capsys)[0]["weights"] == "cut"
    sizes = {path.name: path.stat().st_size for path in out.iterdir()}
    assert sizes["block_2.onnx.data"] == sizes["block_3.onnx.data"] < sizes["block_1.onnx.data"]
    of_block = onnx.load_model(out / "block_5.onnx", load_external_data=False).graph.initializer
    (head,) = (tensor for tensor in of_block if tensor.name == "lm_head.weight")
    assert {entry.key: entry.value for entry in head.external_data} == {
        "location": "block_5.onnx.data",
        "offset": "0",
        "length": str(4 * SMALL.hidden * SMALL.vocabulary),
    }


def test_a_tied_table_is_in_both_blocks_that_read_it(tmp_path: Path) -> None:
    """The head multiplies by the table of the embedding, transposed."""

    def tie(model: ModelProto) -> None:
        head = next(node for node in model.graph.node if node.output[0] == "logits")
        table = onnx.helper.make_node("Transpose", [_TABLE], ["/lm_head/Transpose"], perm=[1, 0])
        head.input[1] = table.output[0]
        model.graph.node.insert(0, table)

    path = saved(optimum_decoder(float32=True), tmp_path / "whole" / "model.onnx", external=True)
    altered("model.onnx", tie)(path.parent)
    for options in ([], ["--copy-weights"]):
        out = tmp_path / f"out{len(options)}"
        assert run([*options, str(path), str(out)]) == 0
        graphs = {
            index: onnx.load_model(out / f"block_{index}.onnx", load_external_data=False).graph for index in range(1, 6)
        }
        readers = [index for index, graph in graphs.items() if _TABLE in {one.name for one in graph.initializer}]
        assert readers == [1, 5]
        assert equal(path, out)


def test_a_run_goes_on_with_the_blocks_that_are_finished(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, left = tmp_path / "out", tmp_path / ".out.unfinished"
    with no_room(150_000):  # the weights of block 1, which have the embedding, are larger
        assert run(["--copy-weights", str(model), str(out)]) == 1
    assert not out.exists() and "File too large" in capsys.readouterr().err
    with no_room(250_000):
        assert run(["--copy-weights", str(model), str(out)]) == 0
    assert not left.exists() and equal(model, out)


def test_a_killed_run_is_gone_on_with(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, left = tmp_path / "out", tmp_path / ".out.unfinished"
    argv = [sys.executable, "-m", _MODULE, "--copy-weights", str(model), str(out)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        for line in iter(process.stdout.readline, b""):
            if b'"block_2.onnx"' in line and b'"blocks"' not in line:
                process.kill()
    if out.exists():
        pytest.skip("it was faster")
    before = {path.name: path.stat().st_ino for path in left.glob("*.onnx")}
    assert {"block_1.onnx", "block_2.onnx"} <= before.keys()
    assert run(["--copy-weights", str(model), str(out)]) == 0
    assert before.items() <= {path.name: path.stat().st_ino for path in out.iterdir()}.items()
    assert equal(model, out)
    assert not [path for path in out.iterdir() if not path.name.startswith("block_")]
    assert told(capsys)[0]["weights"] == "cut"


def test_what_another_run_has_left_is_not_mixed_in(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with no_room(150_000):
        assert run(["--copy-weights", str(model), str(out)]) == 1
    assert run([str(model), str(out)]) == 2
    assert ".out.unfinished was left by a run about something else" in capsys.readouterr().err
    os.utime(model)
    assert run(["--copy-weights", str(model), str(out)]) == 2
    shutil.rmtree(tmp_path / ".out.unfinished")
    assert run(["--copy-weights", str(model), str(out)]) == 0


def test_a_run_that_lacked_its_last_step_alone(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was killed behind the renaming: the folder is whole, and still says that it is not."""
    out = tmp_path / "out"
    with no_room(150_000):
        assert run(["--copy-weights", str(model), str(out)]) == 1
    mark = (tmp_path / ".out.unfinished" / "unfinished.json").read_text()
    assert run(["--copy-weights", str(model), str(out)]) == 0
    (out / "unfinished.json").write_text(mark)
    assert run(["--copy-weights", str(model), str(out)]) == 0
    assert not (out / "unfinished.json").exists()
    (out / "unfinished.json").write_text("{}")
    assert run(["--copy-weights", str(model), str(out)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_two_runs_do_not_write_the_same(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    with unfinished_folder(out, "of the other one"):
        assert run([str(model), str(out)]) == 2
        assert "is being written by another process" in capsys.readouterr().err


@pytest.fixture
def huge(tmp_path: Path) -> Iterator[Path]:
    """Weights that take twice the room that is free, with nothing in them: a file with holes takes no room itself."""
    path = saved(optimum_decoder(float32=True), tmp_path / "whole" / "model.onnx", external=True)
    rows = 2 * shutil.disk_usage(tmp_path).free // (4 * SMALL.hidden)
    altered("model.onnx", lambda model: enlarged(model, rows))(path.parent)
    os.truncate(path.parent / "model.onnx_data", (1 << 20) + rows * 4 * SMALL.hidden)
    yield path


def enlarged(model: ModelProto, rows: int) -> None:
    """The table of the embedding has so many rows, behind everything else in its file."""
    (table,) = (tensor for tensor in model.graph.initializer if tensor.name == _TABLE)
    table.dims[0] = rows
    del table.external_data[:]
    for key, text in (("location", "model.onnx_data"), ("offset", str(1 << 20))):
        table.external_data.add(key=key, value=text)


def test_room_is_looked_for_first(huge: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "out"
    assert run(["--copy-weights", str(huge), str(out)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"blockrelay: {out.parent} has no room: the blocks take ") and said.count("\n") == 1
    assert not out.parent.exists()
    assert run([str(huge), str(out)]) == 0


def test_two_gigabytes_of_weights_do_not_come_into_memory(tmp_path: Path) -> None:
    def peak_kib(path: Path, out: Path) -> int:
        process = subprocess.Popen([sys.executable, "-m", _MODULE, str(path), str(out)], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return usage.ru_maxrss

    path = saved(optimum_decoder(float32=True), tmp_path / "whole" / "model.onnx", external=True)
    small = peak_kib(path, tmp_path / "small")
    rows = (2 << 30) // (4 * SMALL.hidden)
    altered("model.onnx", lambda model: enlarged(model, rows))(path.parent)
    os.truncate(path.parent / "model.onnx_data", (1 << 20) + (2 << 30))
    large = peak_kib(path, tmp_path / "large")
    assert large - small < 100 << 10


def test_a_copy_goes_on_where_it_has_ended(tmp_path: Path) -> None:
    source, to = tmp_path / "weights", tmp_path / "copy"
    source.write_bytes(os.urandom(1 << 20))
    (tmp_path / ".copy.part").write_bytes(source.read_bytes()[:700_000])
    sizes: list[int] = []
    copy_file(source, to, sizes.append)
    assert to.read_bytes() == source.read_bytes() and sizes == [700_000, (1 << 20) - 700_000]
    copy_file(source, to, sizes.append)
    assert sizes[2:] == [1 << 20]


def test_weights_inside_the_model_go_into_the_blocks_that_read_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(genai_decoder(), tmp_path / "whole" / "model.onnx")
    assert run(["--copy-weights", str(path), str(tmp_path / "out")]) == 0
    assert told(capsys)[0]["weights"] == "inside"
    assert len(list((tmp_path / "out").iterdir())) == SMALL.layers + 1
