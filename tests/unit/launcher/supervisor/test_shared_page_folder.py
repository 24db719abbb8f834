"""The folder of shared pages lives exactly as long as its owner."""

import os
import subprocess
import sys
from pathlib import Path

from blockrelay_launcher.supervisor.shared_page_folder import default_limit, open_page_folder

OWN = """
import sys
from pathlib import Path
from blockrelay_launcher.supervisor.shared_page_folder import open_page_folder
with open_page_folder(Path(sys.argv[1])) as folder:
    (folder / "page").write_bytes(b"x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def start_owner(root: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", OWN, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_nothing_is_left_after_a_clean_end(tmp_path: Path) -> None:
    with open_page_folder(tmp_path, data=Path("/the/data")) as folder:
        assert folder is not None and folder.parent == tmp_path
        assert (folder / "owner").read_text() == "/the/data"
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "page").write_bytes(b"x")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_owner_left_is_removed_by_the_next_and_a_living_owners_stays(tmp_path: Path) -> None:
    with start_owner(tmp_path) as killed, start_owner(tmp_path) as living:
        assert killed.stdout is not None and living.stdout is not None
        dead, alive = Path(killed.stdout.readline().strip()), Path(living.stdout.readline().strip())
        killed.kill()
        killed.wait()
        assert dead.exists()
        with open_page_folder(tmp_path) as folder:
            assert set(tmp_path.iterdir()) == {alive, folder}
        assert (alive / "page").exists()
        living.communicate()
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_not_ours_to_judge_stay(tmp_path: Path) -> None:
    beginning, link, file = tmp_path / "blockrelay-young", tmp_path / "blockrelay-link", tmp_path / "blockrelay-file"
    beginning.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "owner").touch()
    link.symlink_to(elsewhere)
    file.touch()
    old = tmp_path / "blockrelay-old"
    old.mkdir()
    os.utime(old, (1, 1))
    with open_page_folder(tmp_path):
        assert beginning.exists() and link.is_symlink() and file.exists() and (elsewhere / "owner").exists()
        assert not old.exists(), "nobody ever came to own it"


def test_without_a_folder_in_memory_there_is_none(tmp_path: Path) -> None:
    with open_page_folder(tmp_path / "missing") as folder:
        assert folder is None
    assert default_limit(tmp_path / "missing") == 0
    assert default_limit(tmp_path) > 0
