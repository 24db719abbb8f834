"""A password that stands in a file, so that it is changed without a restart, and how the URL of a Redis names the file.

    redis://gateway@redis:6379/0?password_file=/etc/blockrelay/password/password

The first line is the password, as in the files of `make-secrets`: lines behind it are passwords that Redis knows too.
"""

from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

from blockrelay.bounded_file import read_bounded
from blockrelay.errors import UsageError

#: The parameter of a URL that names the file.
PARAMETER = "password_file"
MAX_BYTES = 1 << 20


def read_password(path: Path) -> str:
    """The password in the file as it is now. Raises UsageError, one line that names the file."""
    lines = read_bounded(path, MAX_BYTES).splitlines()
    try:
        password = lines[0].decode().strip() if lines else ""
    except UnicodeDecodeError:
        raise UsageError(f"{path}: its first line is not UTF-8") from None
    if not password:
        raise UsageError(f"{path}: its first line has no password")
    return password


def has_password(url: str) -> bool:
    """Whether the URL says by itself what the password is, or where."""
    try:
        parts = urlsplit(url)
    except ValueError:  # whoever connects says what is wrong with it
        return False
    return bool(parts.password) or not {"password", PARAMETER}.isdisjoint(parse_qs(parts.query))


def with_password_file(url: str, file: str | None) -> str:
    """`url`, which names the file of its password from now on; as it is without a file, or with a password."""
    if not file or has_password(url):
        return url
    return f"{url}{'&' if '?' in url else '?'}{urlencode({PARAMETER: file})}"
