"""Type and range checks for values of a message, so that no bytes in Redis can crash a reader."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from blockrelay.errors import WireError

#: Largest position, sequence number or size: far beyond every model, and fits an int64 array index.
MAX_COUNT = 2**48
MAX_TOKEN = 2**31 - 1


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turns every exception that missing or mistyped fields raise in its body into a WireError that names `what`."""
    try:
        yield
    except WireError as error:
        raise WireError(f"{what}: {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise WireError(f"{what} does not decode: {type(error).__name__} {error}") from error


def text(value: object) -> str:
    """Returns `value` if it is a string that UTF-8 can encode, else raises WireError."""
    if type(value) is not str:
        raise WireError(f"expected text, not {type(value).__name__}")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise WireError("text with half of a surrogate pair")
    return value


def flag(value: object) -> bool:
    """Returns `value` if it is a boolean, else raises WireError."""
    if type(value) is not bool:
        raise WireError(f"expected true or false, not {type(value).__name__}")
    return value


def count(value: object, limit: int = MAX_COUNT) -> int:
    """Returns `value` if it is an integer in 0..`limit`, else raises WireError."""
    if type(value) is not int or not 0 <= value <= limit:
        raise WireError(f"expected a whole number in 0..{limit}, not {value!r:.40}")
    return value


def items(value: object) -> list[Any]:
    """Returns `value` if it is a list, else raises WireError."""
    if type(value) is not list:
        raise WireError(f"expected a list, not {type(value).__name__}")
    return cast(list[Any], value)


def entries(value: object) -> dict[str, Any]:
    """Returns `value` if it is a map whose keys are strings, else raises WireError."""
    if type(value) is not dict or not all(type(key) is str for key in cast(dict[object, object], value)):
        raise WireError("expected a map with text for keys")
    return cast(dict[str, Any], value)


def tokens(value: object) -> tuple[int, ...]:
    """Returns `value` as a tuple if it is a list of token ids, else raises WireError."""
    return tuple(count(token, MAX_TOKEN) for token in items(value))
