"""An install without C++ kernels serves, slowly, and everything that people look at says so and what to do."""

import json
import os
import subprocess
from pathlib import Path

import blockrelay_worker
from tests.support.models.tiny_model import write_tiny_model
from tests.support.systems.up_process import COMMAND, UpProcess

MISSING = "slow: NumPy computes in place of our C++ kernels, some 30 times slower: they "


def install(folder: Path, *, library: bytes | None) -> dict[str, str]:
    """The environment of processes whose worker package is as an install leaves it that could build no kernels, or
    built them from these bytes."""
    real, made = Path(blockrelay_worker.__file__).parent, folder / "blockrelay_worker"
    (made / "kernels").mkdir(parents=True)
    for there in real.iterdir():
        if there.name != "kernels":
            (made / there.name).symlink_to(there)
    for module in (real / "kernels").glob("*.py"):
        (made / "kernels" / module.name).symlink_to(module)
    for built in (real / "kernels").glob("_*.so") if library is not None else ():
        (made / "kernels" / built.name).write_bytes(library or b"")
    return {**os.environ, "PYTHONPATH": str(folder)}


def run(env: dict[str, str], *argv: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*COMMAND, *argv], env=env, capture_output=True, text=True, timeout=100, check=True)


def test_up_and_status_and_devices_say_that_kernels_are_missing(tmp_path: Path) -> None:
    model, data = write_tiny_model(tmp_path / "model"), tmp_path / "data"
    env = install(tmp_path / "site", library=None)
    argv = [*COMMAND, "up", "--model", str(model), "--port", "0", "--replicas", "2", "--data", str(data)]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            up = UpProcess(process, data)
            table = run(env, "status", "--data", str(data)).stdout
            told = json.loads(run(env, "status", "--data", str(data), "--json").stdout)
            assert up.stop() == 0
            assert process.stderr is not None
            (said,) = [line for line in process.stderr.read().splitlines() if line.startswith("slow: ")]
        finally:
            process.kill()
    assert said.startswith(f"{MISSING}are missing; ") and "make install" in said
    (shown,) = [line for line in table.splitlines() if line.startswith("slow: ")]
    assert shown.startswith(f"{said} (") and shown.count(",") == said.count(",") + 1, "both workers are named"
    (found,) = told["models"].values()
    assert [f"slow: {worker['slow']}" for worker in found["workers"]] == [said, said]
    assert said in run(env, "devices").stdout.splitlines()
    assert f"slow: {json.loads(run(env, 'devices', '--json').stdout)['slow']}" == said


def test_the_demo_says_that_kernels_cannot_be_loaded(tmp_path: Path) -> None:
    env = install(tmp_path / "site", library=b"built for another machine")
    model = write_tiny_model(tmp_path / "model")
    done = run(env, "demo", "--model", str(model), "--stages", "1")
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("slow: ")]
    assert said.startswith(f"{MISSING}cannot be loaded (") and ", then `make install` again" in said
    assert "what it took" in done.stdout
