"""The `blockrelay` command as people type it: what cannot work is one line and exit code 2."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.main import get_command

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.protocol.number import NUMBERS
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_launcher.cli.groups import GROUPS
from blockrelay_launcher.cli.main import app, main
from blockrelay_worker.execution.numerics_id import numerics_id
from tests.support.models.tiny_model import BLOCKS, write_tiny_model
from tests.support.systems.up_process import COMMAND

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def run(*argv: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*COMMAND, *map(str, argv)], capture_output=True, text=True, timeout=60, check=False)


def test_version_and_help() -> None:
    release, protocol, numerics = run("--version").stdout.splitlines()
    assert release == f"blockrelay {version('blockrelay')}"
    assert protocol == f"protocol {NUMBERS}"
    bundled = open_block_folder(BUNDLED_MODEL, blocks=[]).manifest
    assert numerics == f"numerics {numerics_id(bundled)} (bundled model)"
    shown = run("--help")
    assert shown.returncode == 0
    for command in ("up", "status", "cancel", "demo", "generate", "convert"):
        assert command in shown.stdout


@pytest.mark.parametrize(("command", "word"), [("generate", "--prompt"), ("convert", "--precision")])
def test_generate_and_convert_are_other_processes_with_their_own_help(command: str, word: str) -> None:
    shown = run(command, "--help")
    assert shown.returncode == 0 and word in shown.stdout


def test_the_command_alone_is_its_help_in_groups_of_one_line_for_each_command() -> None:
    env = {**os.environ, "COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    shown = subprocess.run(COMMAND, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert (
        shown.stdout == subprocess.run([*COMMAND, "--help"], env=env, capture_output=True, text=True, check=True).stdout
    )
    commands = {name for names in GROUPS.values() for name in names}
    assert commands == set(getattr(get_command(app), "commands", {})), "each is in a group"
    lines = [line.strip("│╭╮╰╯─ ") for line in shown.stdout.splitlines()]
    titles = [line for line in lines if line in GROUPS]
    assert titles == list(GROUPS)
    first = lines.index(titles[0])
    assert [line.split()[0] for line in lines[first:] if line and line not in GROUPS] == [
        name for names in GROUPS.values() for name in names
    ], "one line each"
    assert "--sizing" in next(line for line in lines if line.startswith("analyse ")), "nobody looks for it elsewhere"


def test_a_group_alone_is_its_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for argv in (["keys"], ["dead-letters"]):
        monkeypatch.setattr(sys, "argv", ["blockrelay", *argv])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert not ended.value.code and "list" in out and not err


@pytest.mark.parametrize("name", ["BLOCKRELAY_PORT", "BLOCKRELAY_GATEWAY_PORT"])
def test_a_service_of_kubernetes_that_is_called_as_we_are_says_nothing_to_commands(
    name: str, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ports are on their command lines. Services, which read the setting, refuse it."""
    monkeypatch.setenv(name, "tcp://10.0.0.1:8000")
    code, err = here(capsys, monkeypatch, "up", "--model", model, "--stages", "9", "--port", "8123")
    assert code == 2 and "choose 1 to" in err


def test_generate_gets_its_arguments_as_they_are(model: Path) -> None:
    done = run("generate", "--model", model, "--ids", "1,5,9", "--max-tokens", "3", "--ignore-eos", "--json")
    assert done.returncode == 0 and '"tokens"' in done.stdout, done.stderr
    assert run("generate", "--no-such-option").returncode == 2


def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *argv: str | Path) -> tuple[object, str]:
    """Run the command in this process: exit code and stderr. It must print nothing else."""
    monkeypatch.setattr(sys, "argv", ["blockrelay", *map(str, argv)])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert out == ""
    return ended.value.code, err


def without_chat_template(model: Path, copy: Path) -> Path:
    """A copy of a block folder as one that completes text and cannot chat."""
    shutil.copytree(model, copy)
    (copy / "chat_template.jinja").unlink()
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["files"]["chat_template.jinja"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


def test_what_cannot_work_is_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (wrong := tmp_path / "wrong.jsonl").write_text('{"prompt": "fine"}\n{"prompt": \n')
    (empty := tmp_path / "empty").mkdir()
    nobody = f"unix://{tmp_path}/none.sock"
    silent = without_chat_template(model, tmp_path / "silent")
    for argv, words in [
        (["nonsense"], ["nonsense", "--help"]),
        (["up", "--stages", "0"], ["--stages", "greater than or equal to 1"]),
        (["up", "--nope"], ["--nope"]),
        (["dead-letters", "show"], ["ID"]),
        (["up", "--model", tmp_path / "none"], ["none", "no such block folder"]),
        (
            ["up", "--model", model.parent / "checkpoint"],
            ["a checkpoint", f"blockrelay convert {model.parent}/checkpoint OUT`"],
        ),
        (["up", "--model", empty], ["no block folder", "no manifest.json", "convert CHECKPOINT OUT`"]),
        (
            ["up", "--model", "meta-llama/Llama-3.2-1B"],
            ["hf download meta-llama/Llama-3.2-1B", "convert CHECKPOINT OUT`"],
        ),
        (["up", "--model", wrong], ["a file, not a block folder"]),
        (["dead-letters", "replay", "req-1", "--model", empty, "--redis", nobody], ["no block folder"]),
        (["up", "--model", model, "--host", "192.0.2.1", "--port", "0"], ["192.0.2.1", "choose another with --host"]),
        (["up", "--model", model, "--stages", "9"], [f"the model has {BLOCKS} blocks", f"choose 1 to {BLOCKS}"]),
        (["up", "--model", model, "--redis", "elsewhere"], ["elsewhere", "not the URL of a Redis"]),
        (["up", "--model", model, "--payload-redis", "redis://h"], ["--payload-redis needs --redis"]),
        (["up", "--model", model, "--threads", "5000"], ["5000 threads are too many", "take at most"]),
        (["bench", "--model", model, "--threads", "5000"], ["5000 threads are too many"]),
        (["profile", "--model", model, "--threads", "5000"], ["5000 threads are too many"]),
        (["status", "--data", tmp_path], ["no `up` runs on", "up.json"]),
        (["cancel", "req-1", "--redis", "redis://h", "--data", tmp_path], ["not both"]),
        (["demo", "--model", model, "--stages", "9"], [f"the model has {BLOCKS} blocks"]),
        (["demo", "--batch", tmp_path / "none"], ["none: cannot be read"]),
        (["demo", "--interactive", "--batch", tmp_path / "none"], ["--interactive", "--batch"]),
        (["demo", "--interactive", "--prompt", "x"], ["--prompt is for one answer"]),
        (["demo", "--batch", wrong], ["wrong.jsonl: line 2: not a JSON object"]),
        (["demo", "--batch", wrong, "--concurrency", "0"], ["--concurrency", "greater than or equal to 1"]),
        (["demo", "--json"], ["--json needs --batch"]),
        (["demo", "--concurrency", "3"], ["--concurrency needs --batch"]),
        (["demo", "--model", silent, "--interactive"], ["no chat_template.jinja"]),
        (["profile", "--model", model, "--blocks", tmp_path], ["--blocks is instead of --model"]),
        (["profile", "--max-position", "8"], ["--max-position is for --blocks"]),
        (["profile", "--form", "ours"], ["--form", "'full', 'source'"]),
    ]:
        code, err = here(capsys, monkeypatch, *argv)
        assert code == 2 and err.count("\n") == 1 and all(word in err for word in words), err
        assert err.startswith("blockrelay: "), err


def test_a_wrong_setting_is_named(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKRELAY_CELL", "Not A Cell")
    code, err = here(capsys, monkeypatch, "status")
    assert code == 2 and err.startswith("blockrelay: BLOCKRELAY_CELL: ")
    monkeypatch.delenv("BLOCKRELAY_CELL")
    monkeypatch.setenv("BLOCKRELAY_THREADS", "5000")
    code, err = here(capsys, monkeypatch, "up", "--model", model)
    assert code == 2 and err.startswith("blockrelay: BLOCKRELAY_THREADS: ") and "5000 threads are too many" in err


def test_a_redis_that_is_not_there_is_one_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, err = here(capsys, monkeypatch, "status", "--redis", f"unix://{tmp_path}/none.sock")
    assert code == 1 and "Redis does not answer" in err and err.count("\n") == 1


def test_keys_are_made_listed_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(*argv: str) -> tuple[object, str, str]:
        """In this process: exit code, stdout and stderr."""
        monkeypatch.setattr(sys, "argv", ["blockrelay", "keys", *argv, "--file", str(tmp_path / "keys.json")])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    code, made, err = command("add", "ada", "--tokens-per-minute", "600", "--priority", "5")
    assert code == 0 and made.startswith("br-") and made.count("\n") == 1, err
    _, listed, _ = command("list")
    assert "ada" in listed and "600" in listed and made.strip() not in listed
    assert command("add", "bob")[0] == 0
    assert json.loads((tmp_path / "keys.json").read_text())["keys"][1]["priority"] == 0, "it overtakes nobody"
    _, _, err = command("add", "ada")
    assert err == "blockrelay: there is a key named 'ada' already; remove it first to replace it\n"
    assert command("add", "no such name")[0] == 2
    assert command("remove", "ada")[0] == 0
    assert command("remove", "ada")[0] == 2
    assert "--file" in here(capsys, monkeypatch, "keys", "list")[1]


@pytest.mark.parametrize("option", ["--stages=2", "--gateways=1", "--objective=latency", "--profile=p"])
def test_what_a_topology_says_cannot_be_said_beside_it(option: str) -> None:
    done = run("up", "--topology", "t.yaml", option)
    name = option.partition("=")[0]
    assert done.returncode == 2
    assert done.stderr == f"blockrelay: {name} and --topology: the file says what runs where\n"
