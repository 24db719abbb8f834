"""Reads and writes the file of API keys: the tenants and their limits. It has only the SHA-256 of each key.

A key is 32 random bytes, so its plain hash cannot be reversed; a slow hash is only needed for passwords. The file is
JSON:

    {"keys": [{"name": "ada", "sha256": "...", "tokens_per_minute": 60000, "weight": 2, "priority": 0},
              {"name": "bob", "sha256": "..."}]}

`name` is the tenant. No other tenant can see its requests, its sessions or its KV pages.
"""

import contextlib
import hashlib
import ipaddress
import json
import math
import os
import re
import sys
import tempfile
from dataclasses import asdict, dataclass
from hmac import compare_digest
from pathlib import Path
from secrets import token_urlsafe
from typing import Any, cast

from blockrelay.errors import UsageError

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIELDS = {"name", "sha256", "tokens_per_minute", "concurrency", "weight", "priority", "operator"}
PREFIX = "br-"
#: Priorities that a request may have; lower is earlier.
PRIORITIES = range(-100, 101)
#: The priority of requests that name none, and the earliest that a key allows by default.
USUAL_PRIORITY = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A client's identity and its limits. Raises UsageError for a value that its field does not allow."""

    name: str  # 1 to 64 of a-z 0-9 _ -, the first a letter or digit; "": every client, where keys are off
    tokens_per_minute: int | None = None  # prompt and max_tokens of accepted requests, 1 to 10**12; None: no limit
    concurrency: int | None = None  # accepted and unfinished requests, 1 to 10**12; None: no limit
    weight: float = 1.0  # 0.01 to 100; its share of the workers, relative to other tenants' while they wait too
    priority: int = USUAL_PRIORITY  # the earliest (lowest) priority, in PRIORITIES, that its requests may have
    operator: bool = False  # sees the ids of all requests in status events

    def __post_init__(self) -> None:
        if self.name and not _NAME.fullmatch(self.name):
            raise UsageError(f"the name of a key has 1 to 64 characters of a-z 0-9 _ -, not {self.name!r}")
        for field in ("tokens_per_minute", "concurrency"):
            value = getattr(self, field)
            if value is not None and (type(value) is not int or not 1 <= value <= 10**12):
                raise UsageError(f"{field} of key {self.name!r} must be a whole number from 1, not {value!r}")
        if type(self.weight) not in (int, float) or not math.isfinite(self.weight) or not 0.01 <= self.weight <= 100:
            raise UsageError(f"weight of key {self.name!r} must be a number from 0.01 to 100, not {self.weight!r}")
        if type(self.priority) is not int or self.priority not in PRIORITIES:
            bounds = f"{PRIORITIES[0]} to {PRIORITIES[-1]}"
            raise UsageError(f"priority of key {self.name!r} must be a whole number from {bounds}")
        if type(self.operator) is not bool:
            raise UsageError(f"operator of key {self.name!r} must be true or false, not {self.operator!r}")


#: The tenant of every client where keys are off. It may use any priority, since there are no other tenants.
ANYBODY = Tenant(name="", priority=PRIORITIES[0])


@dataclass(frozen=True, slots=True)
class StoredKey:
    """One key of the file: its tenant and its SHA-256, 64 hex digits."""

    tenant: Tenant
    sha256: str


def new_key() -> str:
    """Returns a new key of 256 random bits. It is not stored, so it must be shown at once."""
    return PREFIX + token_urlsafe(32)


def hash_of(key: str) -> str:
    """Returns the SHA-256 of a key as 64 hex digits, the form in which the file has it."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def find(keys: tuple[StoredKey, ...], presented: str) -> Tenant | None:
    """Returns the tenant whose key is `presented`, or None. Takes as long for a wrong key as for a right one."""
    digest, tenant = hash_of(presented), None
    for stored in keys:
        if compare_digest(stored.sha256, digest):
            tenant = stored.tenant
    return tenant


def read_keys(path: Path) -> tuple[StoredKey, ...]:
    """Returns all keys of the file. Raises UsageError, one line with the file and what is wrong in it."""
    try:
        content: Any = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"the file of API keys {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the file of API keys {path} is not JSON: {error}") from error
    try:
        entries = cast(dict[str, Any], content)["keys"] if isinstance(content, dict) else None
        if not isinstance(entries, list) or set(cast(dict[str, Any], content)) != {"keys"}:
            raise UsageError('it must hold {"keys": [...]} and nothing else')
        keys = tuple(_stored(entry) for entry in cast(list[Any], entries))
        names = [key.tenant.name for key in keys]
        if len(set(names)) != len(names):
            raise UsageError("two keys have the same name")
    except (KeyError, UsageError) as error:
        why = 'it has no "keys"' if isinstance(error, KeyError) else error
        raise UsageError(f"the file of API keys {path} cannot be used: {why}") from error
    return keys


def write_keys(path: Path, keys: tuple[StoredKey, ...]) -> None:
    """Replaces the file of keys atomically, so that readers see the old or the new file.

    A new file can be read only by its owner. An existing one keeps its mode, and its group if this user may set that,
    so that a gateway of another user can still read it. Raises UsageError if the file cannot be written.
    """
    content = {"keys": [_plain(key) for key in keys]}
    place = Path(os.path.realpath(path))  # a symbolic link stays one
    try:
        handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}-")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(content, file, indent=1)
                file.write("\n")
                file.flush()
                _let_read_as_before(handle, place)
                os.fsync(handle)
            os.replace(name, place)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise UsageError(f"the file of API keys {path} cannot be written: {error.strerror or error}") from error


def _let_read_as_before(handle: int, place: Path) -> None:
    """Gives the new file the mode of the old one, and its group if this user may. Windows has neither."""
    if sys.platform == "win32":
        return
    with contextlib.suppress(FileNotFoundError):
        before = place.stat()
        with contextlib.suppress(PermissionError):  # this user is not in that group
            os.fchown(handle, -1, before.st_gid)
        os.fchmod(handle, before.st_mode & 0o777)


def add_key(path: Path, tenant: Tenant) -> str:
    """Creates a key for a new tenant, stores its hash and returns the key. Creates the file if there is none.

    Raises UsageError if the tenant has no name, if there is a key of that name, or if the file cannot be used.
    """
    keys = read_keys(path) if path.exists() else ()
    if not tenant.name:
        raise UsageError("a key needs a name")
    if any(key.tenant.name == tenant.name for key in keys):
        raise UsageError(f"there is a key named {tenant.name!r} already; remove it first to replace it")
    key = new_key()
    write_keys(path, (*keys, StoredKey(tenant, hash_of(key))))
    return key


def remove_key(path: Path, name: str) -> None:
    """Removes the key of the tenant `name`. Raises UsageError when there is none, or the file cannot be used."""
    keys = read_keys(path)
    kept = tuple(key for key in keys if key.tenant.name != name)
    if len(kept) == len(keys):
        raise UsageError(f"there is no key named {name!r} in {path}")
    write_keys(path, kept)


def is_open_to_others(host: str) -> bool:
    """Returns whether `host`, an address to listen on, may be reached from other machines.

    A name may be, unless it is localhost.
    """
    with contextlib.suppress(ValueError):
        return not ipaddress.ip_address(host).is_loopback
    return host != "localhost"


def _stored(entry: Any) -> StoredKey:
    if not isinstance(entry, dict):
        raise UsageError("a key is not a JSON object")
    fields = cast(dict[str, Any], entry)
    if unknown := set(fields) - _FIELDS:
        raise UsageError(f"a key has an unknown field {min(unknown)!r}")
    digest = fields.get("sha256")
    if not isinstance(fields.get("name"), str) or not fields["name"]:
        raise UsageError("a key has no name")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise UsageError(f"sha256 of key {fields['name']!r} must be 64 hexadecimal digits")
    limits = {name: value for name, value in fields.items() if name != "sha256"}
    return StoredKey(Tenant(**limits), digest)


def _plain(key: StoredKey) -> dict[str, Any]:
    given = {"name": key.tenant.name, "sha256": key.sha256, **asdict(key.tenant)}
    return {name: value for name, value in given.items() if value is not None and value is not False}
