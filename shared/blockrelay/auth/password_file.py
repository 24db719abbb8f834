"""Reads a Redis password from a file that the Redis URL names, so that it can be changed without a restart.

    redis://gateway@redis:6379/0?password_file=/etc/blockrelay/password/password

The first line is the password. Further lines, as `make-secrets` writes them, are passwords that Redis accepts too.
"""

from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

from blockrelay.bounded_file import read_bounded
from blockrelay.errors import UsageError

#: The parameter of a URL that names the file.
PARAMETER = "password_file"
#: Most bytes of a password file.
MAX_BYTES = 1 << 20


def read_password(path: Path) -> str:
    """Returns the password that the file has now: its first line, without spaces around it.

    Raises UsageError, one line that names the file, if it cannot be read, is larger than MAX_BYTES, or has a first line
    that is empty or not UTF-8.
    """
    lines = read_bounded(path, MAX_BYTES).splitlines()
    try:
        password = lines[0].decode().strip() if lines else ""
    except UnicodeDecodeError:
        raise UsageError(f"{path}: its first line is not UTF-8") from None
    if not password:
        raise UsageError(f"{path}: its first line has no password")
    return password


def has_password(url: str) -> bool:
    """Returns whether the URL has a password or names a password file. False for a URL that cannot be parsed."""
    try:
        parts = urlsplit(url)
    except ValueError:  # connecting will report what is wrong with it
        return False
    return bool(parts.password) or not {"password", PARAMETER}.isdisjoint(parse_qs(parts.query))


def with_password_file(url: str, file: str | None) -> str:
    """Returns `url` with the parameter `password_file`, whose value is `file`.

    Returns `url` as it is if `file` is empty or None, or if `url` has a password or names a password file.
    """
    if not file or has_password(url):
        return url
    return f"{url}{'&' if '?' in url else '?'}{urlencode({PARAMETER: file})}"
