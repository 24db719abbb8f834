"""The folder of an `up`: one at a time, private, and findable."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from blockrelay.errors import UsageError
from blockrelay.up_file import Running, read_running
from blockrelay_launcher.supervisor import data_folder
from blockrelay_launcher.supervisor.data_folder import open_data_folder

RUNNING = Running(
    pid=1, url="http://h:1", urls=["http://h:1"], redis_url="unix:///x", payload_redis_url=None, cell="c0", model="/m"
)


def test_one_up_at_a_time_and_others_can_find_it(tmp_path: Path) -> None:
    with open_data_folder(tmp_path / "data") as folder:
        folder.announce(RUNNING)
        assert read_running(tmp_path / "data") == RUNNING
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder.path / "up.json").stat().st_mode) == 0o600
        with (
            pytest.raises(UsageError, match=f"another `blockrelay up` \\(process {os.getpid()}\\)"),
            open_data_folder(tmp_path / "data"),
        ):
            pass
        folder.withdraw()
    with open_data_folder(tmp_path / "data") as folder:
        assert (folder.path / "logs").is_dir()
    with pytest.raises(UsageError, match="no `up` runs on"):
        read_running(tmp_path / "data")


def test_without_a_path_nothing_stays() -> None:
    with open_data_folder(None) as folder:
        (folder.path / "something").write_text("x")
    assert not folder.path.exists()


HOLDER = """
import fcntl, os, sys
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
os.write(lock, sys.argv[2].encode())
print("locked", flush=True)
sys.stdin.readline()
"""


def test_the_redis_of_a_killed_up_may_take_a_moment_to_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    argv = [sys.executable, "-c", HOLDER, str(tmp_path / "lock"), str(ended.pid)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        monkeypatch.setattr(data_folder, "ABANDONED_REDIS_S", 0.2)
        with pytest.raises(UsageError), open_data_folder(tmp_path):
            pass
        monkeypatch.setattr(data_folder, "ABANDONED_REDIS_S", 30.0)
        holder.communicate("\n", timeout=10)
        with open_data_folder(tmp_path):
            pass


@pytest.mark.parametrize("content", ["{", "[]", '{"pid": 1}', '{"pid": 1, "wrong": 2}'])
def test_a_damaged_up_json_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "up.json").write_text(content)
    with pytest.raises(UsageError, match=r"up\.json cannot be read"):
        read_running(tmp_path)


def test_a_folder_that_cannot_be_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--data"), open_data_folder(tmp_path / "file"):
        pass
