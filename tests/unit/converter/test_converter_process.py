"""The converter as a process: exit codes, one-line errors, what a kill leaves behind, how much memory it takes."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.errors import BlockFolderError, ExecutionError
from blockrelay_converter.golden_answers import known_answers
from tests.support.models.checkpoints import write_checkpoint
from tests.support.models.sparse_checkpoint import write_sparse_checkpoint
from tests.support.waiting import wait_until

pytestmark = pytest.mark.thorough

CONVERTER = (sys.executable, "-m", "blockrelay_converter")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*CONVERTER, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_conversion_says_in_one_line_what_it_made(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "my-model", seed=1)
    done = run(checkpoint, tmp_path / "out", "--precision", "w8a8", "--name", "tiny")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{tmp_path / 'out'}: tiny, w8a8, 5 blocks, ")
    assert done.stdout.count("\n") == 1
    assert open_block_folder(tmp_path / "out").model.name == "tiny"


def test_what_a_checkpoint_lacks_is_said_in_a_line_each(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=1, tokenizer=False)
    done = run(checkpoint, tmp_path / "out", "--no-known-answers")
    assert (done.returncode, done.stderr) == (0, "note: no tokenizer.json: prompts are token ids, and answers too\n")


def test_what_is_not_applied_is_said_in_a_line_and_kept_in_the_folder(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=1)
    (checkpoint / "generation_config.json").write_text('{"typical_p": 0.9, "stop_strings": ["###"]}')
    (checkpoint / "adapter_config.json").write_text("{}")
    done = run(checkpoint, tmp_path / "out", "--no-known-answers")
    said = (
        'note: generation_config.json: not applied: stop_strings ["###"], typical_p 0.9\n'
        "note: adapter_config.json: the adapter is not applied, the model is converted without it\n"
    )
    assert (done.returncode, done.stderr) == (0, said)
    kept = open_block_folder(tmp_path / "out", known_answers=False).manifest.ignored_defaults
    assert kept == {"typical_p": 0.9, "stop_strings": ["###"]}


def test_w8a8_is_the_default_and_fp32_has_no_known_answers(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=1)
    assert run(checkpoint, tmp_path / "a").returncode == 0
    assert run(checkpoint, tmp_path / "b", "--precision", "fp32").returncode == 0
    first, second = open_block_folder(tmp_path / "a").manifest, open_block_folder(tmp_path / "b").manifest
    assert (first.precision, second.precision) == ("w8a8", "fp32")
    assert all(block.known_answer for block in first.blocks)
    assert not any(block.known_answer for block in second.blocks)


def test_known_answers_depend_on_the_folder_and_on_nothing_else(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=1)
    environments = ({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "7", "LC_ALL": "C"})
    for number, environment in enumerate(environments):
        out = tmp_path / str(number)
        command = [*CONVERTER, str(checkpoint), str(out)]
        subprocess.run(command, env=os.environ | environment, check=True, capture_output=True)
    assert (tmp_path / "0/manifest.json").read_bytes() == (tmp_path / "1/manifest.json").read_bytes()


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "model_type"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling.rope_type"),
    ],
)
def test_an_unsupported_model_is_exit_code_2_and_one_line_with_the_field(
    config: dict[str, object], field: str, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=1, config=config)
    done = run(checkpoint, tmp_path / "out")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("blockrelay: ")
    assert field in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_taken_place_is_exit_code_2_and_one_line_unless_forced(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=1)
    assert run(checkpoint, tmp_path / "out", "--no-known-answers").returncode == 0
    again = run(checkpoint, tmp_path / "out")
    assert again.returncode == 2
    assert again.stderr == f"blockrelay: {tmp_path / 'out'} exists and is not empty (--force replaces a block folder)\n"
    assert run(checkpoint, tmp_path / "out", "--force").returncode == 0
    open_block_folder(tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "checkpoint"),
        (("c",), "out"),
        (("c", "out", "--max-position", "0"), "--max-position"),
        (("c", "out", "--fast"), "--fast"),
    ],
)
def test_bad_arguments_are_exit_code_2_and_one_line(arguments: tuple[str, ...], named: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("blockrelay: ")
    assert named in done.stderr
    assert done.stderr.count("\n") == 1


def test_help_explains_the_options() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "--precision" in done.stdout


def test_a_place_that_cannot_be_written_is_exit_code_1_and_one_line(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=1)
    (tmp_path / "file").write_text("")
    done = run(checkpoint, tmp_path / "file" / "out")
    assert done.returncode == 1
    assert done.stderr.startswith("blockrelay: ")
    assert done.stderr.count("\n") == 1


def test_a_disk_that_takes_no_more_is_exit_code_1_and_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=1)
    command = ["bash", "-c", 'ulimit -f 64; exec "$@"', "bash", *CONVERTER, str(checkpoint), str(tmp_path / "out")]
    uncounted = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}  # it writes too
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=uncounted)
    assert done.returncode == 1
    assert done.stderr.startswith("blockrelay: ")
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_worker_that_cannot_answer_says_why(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=1)
    folder = tmp_path / "out"
    assert run(checkpoint, folder, "--no-known-answers").returncode == 0
    manifest = open_block_folder(folder, known_answers=False).manifest
    (folder / "rotary.bin").unlink()
    with pytest.raises(ExecutionError, match=r"known answers could not be computed: .*rotary\.bin: missing"):
        known_answers(folder, range(1, manifest.model.blocks + 1))


def test_progress_is_shown_on_a_terminal_and_only_on_stderr(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=1)
    ours, theirs = pty.openpty()
    command = [*CONVERTER, str(checkpoint), str(tmp_path / "out"), "--precision", "fp32"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=os.environ | {"TERM": "xterm"})
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # Linux reports the closed other end of a terminal as an error
        pass
    os.close(ours)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.read().count(b"\n") == 1
    assert process.wait() == 0
    assert b"block_5" in shown
    assert b"MB" in shown or b"kB" in shown


def wait_for(process: subprocess.Popen[Any], folder: Path, file: str) -> None:
    """Until the conversion to `folder/out` has begun to write `file`; it must not be over then."""

    def there() -> bool:
        return process.poll() is not None or any(folder.glob(f".out.*.partial/{file}"))

    wait_until(there, f"{file} appears", poll_s=0.001)
    assert process.poll() is None, "the conversion was over before it could be interrupted"


class TestInterrupted:
    """A conversion large enough to be caught in the middle; it converts zeros, so it needs no random numbers."""

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        write_sparse_checkpoint(
            tmp_path / "c", hidden_size=512, num_hidden_layers=24, intermediate_size=1536, vocab_size=4000
        )
        return tmp_path / "c"

    def interrupt(self, checkpoint: Path, appears: str, how: signal.Signals) -> tuple[int, str]:
        """Send a signal when the file `appears` is there; the exit code and stderr."""
        out = checkpoint.parent / "out"
        with subprocess.Popen([*CONVERTER, str(checkpoint), str(out)], stderr=subprocess.PIPE, text=True) as process:
            wait_for(process, checkpoint.parent, appears)
            process.send_signal(how)
            _, errors = process.communicate()
            assert not out.exists()
            return process.returncode, errors

    @pytest.mark.parametrize("moment", ["graphs", "blocks/block_1.bin", "blocks/block_9.bin", "manifest.json"])
    def test_a_killed_conversion_leaves_nothing_that_looks_finished(self, checkpoint: Path, moment: str) -> None:
        code, _ = self.interrupt(checkpoint, moment, signal.SIGKILL)
        assert code == -signal.SIGKILL
        (left,) = checkpoint.parent.glob(".out.*.partial")
        with pytest.raises(BlockFolderError):
            open_block_folder(left)

    def test_the_next_conversion_works_and_removes_what_was_left(self, checkpoint: Path) -> None:
        self.interrupt(checkpoint, "blocks/block_3.bin", signal.SIGKILL)
        small = write_checkpoint(checkpoint.parent / "small", seed=1)
        assert run(small, checkpoint.parent / "out").returncode == 0
        open_block_folder(checkpoint.parent / "out")
        assert not list(checkpoint.parent.glob(".out.*"))

    def test_the_next_conversion_spares_one_that_is_still_running(self, checkpoint: Path) -> None:
        out = checkpoint.parent / "out"
        small = write_checkpoint(checkpoint.parent / "small", seed=1)
        with subprocess.Popen([*CONVERTER, str(checkpoint), str(out)], stderr=subprocess.PIPE) as running:
            wait_for(running, checkpoint.parent, "blocks/block_2.bin")
            running.send_signal(signal.SIGSTOP)
            assert run(small, out, "--no-known-answers").returncode == 0
            assert len(list(checkpoint.parent.glob(".out.*.partial"))) == 1
            running.kill()

    def test_ctrl_c_cleans_up_and_says_nothing_more_than_a_line(self, checkpoint: Path) -> None:
        code, errors = self.interrupt(checkpoint, "blocks/block_2.bin", signal.SIGINT)
        assert code == 130
        assert len([line for line in errors.splitlines() if not line.startswith("note: ")]) <= 1
        assert "Traceback" not in errors
        assert not list(checkpoint.parent.glob(".out.*"))


def resident(pid: int, kind: str) -> int:
    """Bytes of memory of a process, kind RssAnon (private) or RssFile (mapped files); 0 when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(kind)), 0)


def peak_of_conversion(kind: str, checkpoint: Path, *options: str) -> int:
    """The largest `resident` seen while a checkpoint is converted."""
    command = [*CONVERTER, str(checkpoint), str(checkpoint.parent / "out"), "--no-known-answers", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        peaks = [0]

        def over() -> bool:
            peaks.append(resident(process.pid, kind))
            return process.poll() is not None

        wait_until(over, "the conversion is over", timeout_s=60, poll_s=0.001)
    assert process.returncode == 0
    return max(peaks)


@pytest.mark.parametrize("precision", ["w8a8", "w4a8", "fp32", "fp16"])
def test_private_memory_stays_below_two_layers_and_the_embedding(precision: str, tmp_path: Path) -> None:
    limit = write_sparse_checkpoint(
        tmp_path / "c", hidden_size=1024, num_hidden_layers=3, intermediate_size=2816, vocab_size=16000
    )
    assert 0 < peak_of_conversion("RssAnon", tmp_path / "c", "--precision", precision) < limit


def test_mapped_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path) -> None:
    write_sparse_checkpoint(
        tmp_path / "c", hidden_size=1024, num_hidden_layers=16, intermediate_size=2816, vocab_size=2000
    )
    size = (tmp_path / "c" / "model.safetensors").stat().st_size
    assert 0 < peak_of_conversion("RssFile", tmp_path / "c") < size / 2
