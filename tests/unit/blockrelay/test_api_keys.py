"""The file of API keys: what is stored, what is refused, and what `blockrelay keys` does with it."""

import errno
import json
import os
from pathlib import Path

import pytest

from blockrelay.auth.api_keys import (
    Tenant,
    add_key,
    find,
    hash_of,
    is_open_to_others,
    read_keys,
    remove_key,
)
from blockrelay.errors import UsageError

HASH = hash_of("br-x")


def test_a_key_is_found_by_itself_alone(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    ada, bob = Tenant(name="ada", tokens_per_minute=60, concurrency=2, weight=2, priority=-5), Tenant(name="bob")
    key_of_ada, key_of_bob = add_key(file, ada), add_key(file, bob)
    keys = read_keys(file)
    assert (find(keys, key_of_ada), find(keys, key_of_bob)) == (ada, bob)
    for wrong in ("", key_of_ada[:-1], key_of_ada + "a", hash_of(key_of_ada), "\udcff"):
        assert find(keys, wrong) is None


def test_a_key_that_was_given_no_priority_has_that_of_everybody(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"name": "ada", "sha256": HASH}]}))  # by hand, or by an older release
    add_key(file, Tenant(name="bob"))
    assert [key.tenant.priority for key in read_keys(file)] == [0, 0]


def test_only_hashes_are_stored_for_nobody_else_to_read(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = add_key(file, Tenant(name="ada"))
    assert len(key) > 40 and key not in file.read_text() and hash_of(key) in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["keys.json"]


def test_a_file_that_others_may_read_stays_so_and_a_link_stays_a_link(tmp_path: Path) -> None:
    """A gateway in a container is another user, and a folder may show the file through a link."""
    file, link = tmp_path / "real" / "keys.json", tmp_path / "keys.json"
    file.parent.mkdir()
    link.symlink_to(file)
    add_key(link, Tenant(name="ada"))
    file.chmod(0o640)
    add_key(link, Tenant(name="bob"))
    assert link.is_symlink() and file.stat().st_mode & 0o777 == 0o640
    assert [key.tenant.name for key in read_keys(file)] == ["ada", "bob"]
    assert [p.name for p in file.parent.iterdir()] == ["keys.json"]


def test_a_file_that_cannot_be_replaced_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys.json"
    add_key(file, Tenant(name="ada"))
    before = file.read_text()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="cannot be written: No space left"):
        add_key(file, Tenant(name="bob"))
    assert file.read_text() == before and [p.name for p in tmp_path.iterdir()] == ["keys.json"]


def test_a_name_is_there_once_and_can_be_removed(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = add_key(file, Tenant(name="ada"))
    with pytest.raises(UsageError, match="'ada' already"):
        add_key(file, Tenant(name="ada"))
    remove_key(file, "ada")
    assert read_keys(file) == () and find(read_keys(file), key) is None
    with pytest.raises(UsageError, match="no key named 'ada'"):
        remove_key(file, "ada")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not JSON"),
        ('{"keys": ' + 100_000 * "[", "not JSON"),
        ("[]", "must hold"),
        ('{"keys": [], "more": 1}', "must hold"),
        ('{"keys": {}}', "must hold"),
        ('{"keys": [1]}', "not a JSON object"),
        ('{"keys": [{"sha256": "HASH"}]}', "has no name"),
        ('{"keys": [{"name": "a", "sha256": "br-secret"}]}', "64 hexadecimal digits"),
        ('{"keys": [{"name": "A b", "sha256": "HASH"}]}', "1 to 64 characters"),
        ('{"keys": [{"name": "a", "sha256": "HASH", "limit": 1}]}', "unknown field 'limit'"),
        ('{"keys": [{"name": "a", "sha256": "HASH", "tokens_per_minute": 0}]}', "tokens_per_minute"),
        ('{"keys": [{"name": "a", "sha256": "HASH", "concurrency": true}]}', "concurrency"),
        ('{"keys": [{"name": "a", "sha256": "HASH", "weight": NaN}]}', "weight"),
        ('{"keys": [{"name": "a", "sha256": "HASH", "priority": 101}]}', "priority"),
        (json.dumps({"keys": [{"name": "a", "sha256": HASH}] * 2}), "same name"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(content.replace('"HASH"', f'"{HASH}"'))
    with pytest.raises(UsageError) as refused:
        read_keys(file)
    assert words in str(refused.value) and str(file) in str(refused.value) and "\n" not in str(refused.value)
    assert "br-secret" not in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_keys(tmp_path / "none.json")
    with pytest.raises(UsageError, match="cannot be written"):
        add_key(tmp_path / "none" / "keys.json", Tenant(name="ada"))


@pytest.mark.parametrize(
    ("host", "is_open"),
    [("127.0.0.1", False), ("127.1.2.3", False), ("::1", False), ("localhost", False), ("0.0.0.0", True),
     ("::", True), ("192.0.2.7", True), ("gateway.example", True)],
)  # fmt: skip
def test_which_addresses_others_reach(host: str, is_open: bool) -> None:
    assert is_open_to_others(host) == is_open
