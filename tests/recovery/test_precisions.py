"""`blockrelay precision set` changes the precision of a running system; requests end in that which they began in."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from blockrelay_converter.convert import convert
from tests.support.models.tiny_model import write_tiny_model
from tests.support.systems.up_process import UpProcess, run_command, running_up, starting_up
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(300)  # beside the systems that say what is right

REQUESTS, TOKENS = 4, 60


def ask(up: UpProcess, seed: int) -> dict[str, Any]:
    return up.complete(prompt=[1, 5 + seed, 9], max_tokens=TOKENS, temperature=1, seed=seed)


def tokens_of(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


def precision_of(answer: dict[str, Any]) -> str:
    return answer["system_fingerprint"].partition("-")[0]


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny model in two precisions."""
    out = tmp_path_factory.mktemp("w4a8") / "model"
    convert(tiny_model.parent / "checkpoint", out, precision="w4a8", report=lambda *_: None, name="tiny")
    return {"w8a8": tiny_model, "w4a8": out}


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """What undisturbed systems answer, by precision."""
    found: dict[str, list[list[int]]] = {}
    for precision, folder in folders.items():
        with running_up(folder, data=tmp_path_factory.mktemp(precision)) as up, ThreadPoolExecutor(REQUESTS) as pool:
            found[precision] = [tokens_of(one) for one in pool.map(lambda seed: ask(up, seed), range(REQUESTS))]
    assert found["w8a8"] != found["w4a8"]
    return found


def both(folders: dict[str, Path]) -> tuple[Path, str, Path]:
    return folders["w8a8"], "--other-precision", folders["w4a8"]


def command(up: UpProcess, *arguments: str) -> dict[str, Any]:
    done = run_command("precision", *arguments, "--data", up.data, "--json")
    assert done.returncode == 0, done
    return json.loads(done.stdout)


def is_over(up: UpProcess, precision: str) -> bool:
    """Whether all workers serve `precision`, and none another one."""
    now = command(up)
    return not now["pending"] and {one["precision"] for one in now["precisions"] if one["workers"]} == {precision}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers compute slowly, so that requests still run while the precision changes."""
    monkeypatch.setenv("BLOCKRELAY_INJECT_SPEED", "0.02")
    monkeypatch.setenv("BLOCKRELAY_NUMERICS_WAIT_S", "1")


@pytest.mark.parametrize("layout", [("--stages", "2"), ("--replicas", "2")], ids=["two stages", "two replicas"])
def test_requests_end_in_the_precision_in_which_they_began(
    folders: dict[str, Path], alone: dict[str, list[list[int]]], layout: tuple[str, str], slow: None, tmp_path: Path
) -> None:
    model, *options = both(folders)
    with running_up(model, *map(str, options), *layout, data=tmp_path) as up, ThreadPoolExecutor(32) as pool:
        before = [pool.submit(ask, up, seed) for seed in range(REQUESTS)]
        wait_until(lambda: sum(one["running"] for one in up.status()["workers"]), "they run")
        assert command(up, "set", "w4a8")["changed"]
        during: list[Future[dict[str, Any]]] = []

        def goes_on() -> bool:
            during.append(pool.submit(ask, up, len(during) % REQUESTS))
            return is_over(up, "w4a8")

        wait_until(goes_on, "all workers have changed", timeout_s=60)
        after = [pool.submit(ask, up, seed) for seed in range(REQUESTS)]
        for seed, one in enumerate(before):
            assert (precision_of(one.result()), tokens_of(one.result())) == ("w8a8", alone["w8a8"][seed])
        for index, one in enumerate(during):
            precision = precision_of(one.result())
            assert tokens_of(one.result()) == alone[precision][index % REQUESTS]
        for seed, one in enumerate(after):
            assert (precision_of(one.result()), tokens_of(one.result())) == ("w4a8", alone["w4a8"][seed])
        assert not command(up, "set", "w4a8")["changed"], "it is in force already"
        done = run_command("plan", "rollback", "--data", up.data)
        assert done.returncode == 0, done
        wait_until(lambda: is_over(up, "w8a8"), "and back", timeout_s=60)
        assert tokens_of(ask(up, 0)) == alone["w8a8"][0]
        up.assert_nothing_is_ownerless()


def test_a_worker_that_dies_in_the_change_loses_nothing(
    folders: dict[str, Path], alone: dict[str, list[list[int]]], slow: None, tmp_path: Path
) -> None:
    model, *options = both(folders)
    with (
        running_up(model, *map(str, options), "--stages", "2", data=tmp_path) as up,
        ThreadPoolExecutor(REQUESTS + 1) as pool,
    ):
        asked = [pool.submit(ask, up, seed) for seed in range(REQUESTS)]
        wait_until(lambda: sum(one["running"] for one in up.status()["workers"]), "they run")
        change = pool.submit(command, up, "set", "w4a8")
        os.kill(up.pid_of_successor(), signal.SIGKILL)
        for seed, one in enumerate(asked):
            # Without a worker of its numerics id a request goes on in the other precision after a while, and says so.
            precision = precision_of(one.result())
            assert "+" in one.result()["system_fingerprint"] or tokens_of(one.result()) == alone[precision][seed]
        assert change.result()["changed"]
        wait_until(lambda: is_over(up, "w4a8"), "the new process serves the new precision", timeout_s=60)
        assert tokens_of(ask(up, 1)) == alone["w4a8"][1]
        up.assert_nothing_is_ownerless()


def test_the_precision_stays_over_a_restart_and_another_plan(
    folders: dict[str, Path], alone: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    model, *options = both(folders)
    with running_up(model, *map(str, options), data=tmp_path) as up:
        command(up, "set", "w4a8")
        wait_until(lambda: is_over(up, "w4a8"), "all workers have changed", timeout_s=60)
    with running_up(model, *map(str, options), "--stages", "2", data=tmp_path) as up:
        assert is_over(up, "w4a8")
        answer = ask(up, 2)
        assert (precision_of(answer), tokens_of(answer)) == ("w4a8", alone["w4a8"][2])


def test_memory_decides_about_the_precision(
    folders: dict[str, Path],
    alone: dict[str, list[list[int]]],
    slow: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A worker is killed, and its replacement finds no memory: what was accepted ends, and w8a8 comes back later."""
    free = tmp_path / "free"
    monkeypatch.setenv("BLOCKRELAY_INJECT_MEMORY", str(free))
    monkeypatch.setenv("BLOCKRELAY_RESTORE_AFTER_S", "2")
    model, *options = both(folders)
    with (
        running_up(model, *map(str, options), "--degrade", "--stages", "2", data=tmp_path / "data") as up,
        ThreadPoolExecutor(REQUESTS) as pool,
    ):
        asked = [pool.submit(ask, up, seed) for seed in range(REQUESTS)]
        wait_until(lambda: sum(one["running"] for one in up.status()["workers"]), "they run")
        free.write_text("1000")
        os.kill(up.pid_of("blockrelay_worker")[0], signal.SIGKILL)
        wait_until(lambda: command(up)["degraded_from"] == "w8a8", "the cell is degraded", timeout_s=60)
        wait_until(lambda: is_over(up, "w4a8"), "all workers have changed", timeout_s=60)
        for seed, one in enumerate(asked):
            precision = precision_of(one.result())
            assert "+" in one.result()["system_fingerprint"] or tokens_of(one.result()) == alone[precision][seed]
        assert tokens_of(ask(up, 0)) == alone["w4a8"][0]
        free.unlink()
        wait_until(lambda: is_over(up, "w8a8"), "it goes back", timeout_s=60)
        assert tokens_of(ask(up, 0)) == alone["w8a8"][0]
        assert command(up)["degraded_from"] is None
        done = run_command("plan", "history", "--data", up.data, "--json")
        origins = [entry["origin"] for entry in reversed(json.loads(done.stdout))]
        assert origins == ["settings", "degraded", "restored"]
        up.assert_nothing_is_ownerless()


def test_a_start_without_the_folder_in_force_says_what_to_do(folders: dict[str, Path], tmp_path: Path) -> None:
    def listed(up: UpProcess) -> str:
        return httpx.get(f"{up.url}/v1/models").json()["data"][0]["precision"]

    model, *options = both(folders)
    with running_up(model, *map(str, options), data=tmp_path) as up:
        assert listed(up) == "w8a8"
        command(up, "set", "w4a8")
        wait_until(lambda: is_over(up, "w4a8"), "all workers have changed", timeout_s=60)
        wait_until(lambda: listed(up) == "w4a8", "clients see it within a second or so")
        entries = json.loads(run_command("plan", "history", "--data", up.data, "--json").stdout)
        assert [entry["precision"] for entry in entries] == ["w4a8", "w8a8"]
    with starting_up("--model", str(model), "--port", "0", data=tmp_path) as process:
        said = "which no worker has; start workers with --other-precision DIR, or change to w8a8"
        status = ("status", "--data", tmp_path, "--json")
        wait_until(lambda: said in run_command(*status).stdout, "it says why it is not ready", timeout_s=60)
        done = run_command("precision", "set", "w8a8", "--data", tmp_path)
        assert done.returncode == 0, done
        up = UpProcess(process, tmp_path)
        assert (precision_of(ask(up, 0)), listed(up)) == ("w8a8", "w8a8")
        assert up.stop() == 0


@pytest.fixture(scope="module")
def unlike(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Folders that are not the tiny model in another precision."""
    root = tmp_path_factory.mktemp("unlike")
    found = {
        "another context": write_tiny_model(root / "context", "w4a8", 256),
        "the same precision": Path(shutil.copytree(tiny_model, root / "same")),
        "no block folder": tiny_model.parent / "checkpoint",
    }
    yield found


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("another context", "its context is 256 tokens, not 512"),
        ("the same precision", "are both w8a8: leave one of them out"),
        ("no block folder", "a checkpoint, not a block folder"),
    ],
)
def test_a_folder_that_does_not_belong_to_the_model_is_refused(
    tiny_model: Path, unlike: dict[str, Path], which: str, said: str, tmp_path: Path
) -> None:
    done = run_command("up", "--model", tiny_model, "--other-precision", unlike[which], "--data", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and done.stderr.count("\n") == 1


def test_a_precision_that_is_not_there_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with running_up(tiny_model, data=tmp_path) as up:
        done = run_command("precision", "set", "w4a8", "--data", up.data)
        assert (done.returncode, done.stdout) == (2, "")
        assert "no worker has a folder of precision w4a8 (there is w8a8)" in done.stderr
