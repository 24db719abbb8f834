"""A cached file is used if it is whole and no other user can have written it; anything else only costs time."""

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from blockrelay_worker.execution.onnx.compiled.cache_folder import CacheFolder, default_root, private_folder
from tests.support.full_disk import no_room

OTHER_USER = 54321


@pytest.fixture
def folder(tmp_path: Path) -> CacheFolder:
    root = private_folder(tmp_path / "caches" / "graphs")
    assert root is not None
    return CacheFolder(root, max_bytes=10_000)


def files(folder: CacheFolder) -> list[Path]:
    return sorted(folder.root.iterdir())


def test_what_was_put_is_found_by_its_key_alone(folder: CacheFolder) -> None:
    folder.put("a", b"of a")
    folder.put("b", b"")
    assert [folder.get(key) for key in ("a", "b", "c")] == [b"of a", b"", None]
    folder.put("a", b"of a, anew")
    assert CacheFolder(folder.root).get("a") == b"of a, anew"
    folder.drop("a")
    assert folder.get("a") is None and len(files(folder)) == 1


def test_only_their_user_reads_folder_and_files(folder: CacheFolder) -> None:
    folder.put("a", b"of a")
    assert stat.S_IMODE(folder.root.stat().st_mode) == 0o700
    assert [stat.S_IMODE(file.stat().st_mode) for file in files(folder)] == [0o600]


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def altered(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def appended(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


def of_another_key(file: Path) -> None:
    other = CacheFolder(file.parent / "other")
    other.root.mkdir(mode=0o700)
    other.put("b", b"of b")
    os.replace(files(other)[0], file)


def writable_by_others(file: Path) -> None:
    file.chmod(0o620)


def somebody_elses(file: Path) -> None:
    if os.geteuid():
        pytest.skip("only root gives files away")
    os.chown(file, OTHER_USER, OTHER_USER)


def a_link(file: Path) -> None:
    os.replace(file, file.parent.parent / "moved")
    file.symlink_to(file.parent.parent / "moved")


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def too_large(file: Path) -> None:
    os.truncate(file, 20_000)


@pytest.mark.parametrize(
    "spoil",
    [
        truncated,
        emptied,
        altered,
        appended,
        of_another_key,
        writable_by_others,
        somebody_elses,
        a_link,
        a_folder,
        too_large,
    ],
)
def test_nothing_else_is_believed(
    folder: CacheFolder, spoil: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    folder.put("a", b"of a")
    spoil(files(folder)[0])
    capsys.readouterr()
    assert folder.get("a") is None
    told = capsys.readouterr().out
    assert "CACHE_NOT_BELIEVED" in told and str(folder.root) in told
    if spoil is not a_folder:  # which nobody else would make
        folder.put("a", b"anew")
        assert folder.get("a") == b"anew"


def a_file(path: Path) -> None:
    path.write_bytes(b"")


def a_link_to_a_folder(path: Path) -> None:
    (path.parent / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.parent / "elsewhere")


def open_to_others(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def another_users(path: Path) -> None:
    path.mkdir(mode=0o700)
    somebody_elses(path)


def below_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_bytes(b"")


@pytest.mark.parametrize("spoil", [a_file, a_link_to_a_folder, open_to_others, another_users, below_a_file])
def test_a_folder_that_others_may_have_made_is_gone_without(
    tmp_path: Path, spoil: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "caches" / "graphs"
    path.parent.mkdir()
    spoil(path)
    assert private_folder(path) is None
    assert "CACHE_UNUSABLE" in capsys.readouterr().out


def test_a_full_disk_keeps_nothing_and_fails_nobody(folder: CacheFolder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.put("a", b"of a")
    with no_room(1000):
        folder.put("a", b"x" * 2000)
    assert "CACHE_NOT_WRITTEN" in capsys.readouterr().out
    assert folder.get("a") == b"of a" and len(files(folder)) == 1


def test_a_folder_that_has_gone_fails_nobody(folder: CacheFolder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.root.rmdir()
    folder.put("a", b"of a")
    folder.drop("a")
    assert folder.get("a") is None and "CACHE_NOT_WRITTEN" in capsys.readouterr().out


def test_what_was_used_longest_ago_goes_for_what_is_new(folder: CacheFolder) -> None:
    for age, key in enumerate("abcd"):
        folder.put(key, key.encode() * 2000)
        (newest,) = [file for file in files(folder) if file.stat().st_mtime > 1e9]
        os.utime(newest, (age, age))
    assert folder.get("a") is not None  # used now, so that "b" is the oldest
    folder.put("e", b"e" * 2000)
    assert [key for key in "abcde" if folder.get(key) is not None] == ["a", "c", "d", "e"]
    folder.put("f", b"f" * 20_000)  # more than all of it
    assert folder.get("f") is None and folder.get("e") is not None


def test_what_was_never_finished_goes_after_a_while(folder: CacheFolder) -> None:
    for name in (".1-old", ".2-new"):
        (folder.root / name).write_bytes(b"half")
    os.utime(folder.root / ".1-old", (0, 0))
    folder.put("a", b"of a")
    assert [file.name for file in files(folder) if file.name.startswith(".")] == [".2-new"]


def test_files_appear_whole(folder: CacheFolder, capsys: pytest.CaptureFixture[str]) -> None:
    contents, stop = [bytes([number]) * 3000 for number in range(4)], threading.Event()

    def write(content: bytes) -> None:
        while not stop.is_set():
            folder.put("a", content)

    folder.put("a", contents[0])
    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    found = [folder.get("a") for _ in range(200)]
    stop.set()
    for thread in threads:
        thread.join()
    assert set(found) <= set(contents) and len(files(folder)) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("platform", "environment", "root"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/blockrelay"),
        ("linux", {"XDG_CACHE_HOME": "x", "HOME": "/h"}, "/h/.cache/blockrelay"),
        ("linux", {"HOME": "/h"}, "/h/.cache/blockrelay"),
        ("darwin", {"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/h/Library/Caches/blockrelay"),
        ("win32", {"LOCALAPPDATA": "/l", "USERPROFILE": "/u"}, "/l/blockrelay/cache"),
        ("win32", {"USERPROFILE": "/u"}, "/u/AppData/Local/blockrelay/cache"),
    ],
)
def test_caches_lie_where_the_platform_has_them(platform: str, environment: dict[str, str], root: str) -> None:
    assert default_root(environment, platform) == Path(root)


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_a_user_without_a_home_has_none(platform: str) -> None:
    assert default_root({}, platform) is None
