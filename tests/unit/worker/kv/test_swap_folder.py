"""The swap folder keeps nothing of processes that have gone, and lets no other user in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from blockrelay.errors import UsageError
from blockrelay_worker.kv.store.swap_folder import open_swap_folder

PAGE = f"{'ab' * 32}.1-3"


def test_files_of_others_stay(tmp_path: Path) -> None:
    """A user may name a folder with other things in it, such as the home."""
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    others = ["letter", "report.1-2", ".profile", f"{'ab' * 31}.1-3"]
    for name in (*others, PAGE, ".begun-1-1"):
        (folder / name).write_text(name)
    os.close(open_swap_folder(folder))
    assert sorted(path.name for path in folder.iterdir()) == sorted([*others, "lock"])


def test_the_first_worker_empties_it_and_the_second_does_not(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "swap"
    first = open_swap_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / PAGE).write_bytes(b"of the first")
    second = open_swap_folder(folder)
    assert (folder / PAGE).exists()
    os.close(first)
    third = open_swap_folder(folder)
    assert (folder / PAGE).exists(), "the second is still there"
    os.close(second)
    os.close(third)
    os.close(open_swap_folder(folder))
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_a_process_that_is_killed_leaves_nothing_for_the_next(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from blockrelay_worker.kv.store.swap_folder import open_swap_folder
folder = Path(sys.argv[1])
open_swap_folder(folder)
(folder / sys.argv[2]).write_bytes(b"text of a request")
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "swap"), PAGE], check=False)
    assert done.returncode == -9 and (tmp_path / "swap" / PAGE).exists()
    os.close(open_swap_folder(tmp_path / "swap"))
    assert not (tmp_path / "swap" / PAGE).exists()


@pytest.mark.parametrize("fault", ["open to others", "a file", "a link", "not to be made"])
def test_a_folder_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "swap"
    match fault:
        case "open to others":
            folder.mkdir(mode=0o755)
        case "a file":
            folder.write_text("")
        case "a link":
            (tmp_path / "there").mkdir(mode=0o700)
            folder.symlink_to(tmp_path / "there")
        case _:
            (tmp_path / "file").write_text("")
            folder = tmp_path / "file" / "swap"
    with pytest.raises(UsageError, match="BLOCKRELAY_SWAP_FOLDER"):
        open_swap_folder(folder)
