"""Reads JSON objects field by field and checks the type of every value.

For files that others may have written. In our own formats a field that was not read is an error as well (`done`),
because a field we ignore is a promise we break.
"""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar, cast

from blockrelay.errors import BlockrelayError

T = TypeVar("T")


class Fields:
    """A JSON object whose fields are read one by one.

    Every method that reads a field raises the error given to `__init__` if the field is missing or of another type.
    """

    def __init__(self, value: object, where: str, error: type[BlockrelayError]) -> None:
        """`value`: the decoded object. `where` names it in messages; `error` is the exception raised on any problem."""
        self._where = where
        self._error = error
        if not isinstance(value, dict):
            self.fail("expected an object")
        self._left = dict(cast(dict[str, Any], value))

    @classmethod
    def parse(cls, content: bytes, where: str, error: type[BlockrelayError]) -> "Fields":
        """Decodes the object in `content` (UTF-8 JSON). Raises `error` for anything else, and for names that repeat."""
        try:
            value = json.loads(content, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as problem:
            raise error(f"{where}: not JSON: {problem}") from None
        return cls(value, where, error)

    def fail(self, message: str) -> NoReturn:
        """Raises the error, with this object's name before `message`."""
        raise self._error(f"{self._where}: {message}")

    def take(self, name: str) -> Any:
        """Reads a required field of any type and returns its value."""
        if name not in self._left:
            self.fail(f"field {name!r} is missing")
        return self._left.pop(name)

    def has(self, name: str) -> bool:
        """Returns whether the field is there, not null and not read yet."""
        return self._left.get(name) is not None

    def text(self, name: str, *, one_of: tuple[str, ...] | None = None) -> str:
        """Reads a string; with `one_of`, one from that closed list."""
        value = self.take(name)
        if not isinstance(value, str):
            self.fail(f"{name} must be a string")
        if one_of is not None and value not in one_of:
            self.fail(f"{name} must be one of {', '.join(one_of)}, not {value!r}")
        return value

    def integer(self, name: str, *, minimum: int = 0) -> int:
        """Reads an integer of at least `minimum`."""
        return self._as_integer(self.take(name), name, minimum)

    def number(self, name: str) -> float:
        """Reads a finite number."""
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.fail(f"{name} must be a finite number")
        return float(value)

    def positive(self, name: str, *, zero: bool = False) -> float:
        """Reads a finite number above 0; with `zero`, 0 too."""
        value = self.number(name)
        if value < 0 or (value == 0 and not zero):
            self.fail(f"{name} must be {'0 or more' if zero else 'above 0'}, not {value:g}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Reads a list of strings."""
        value = self.take(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in cast(list[object], value)):
            self.fail(f"{name} must be a list of strings")
        return tuple(cast(list[str], value))

    def flag(self, name: str) -> bool:
        """Reads true or false."""
        value = self.take(name)
        if not isinstance(value, bool):
            self.fail(f"{name} must be true or false")
        return value

    def integers(self, name: str, *, minimum: int = 0) -> tuple[int, ...]:
        """Reads a list of integers of at least `minimum`."""
        value = self.take(name)
        if not isinstance(value, list):
            self.fail(f"{name} must be a list")
        return tuple(self._as_integer(item, name, minimum) for item in cast(list[object], value))

    def optional_text(self, name: str) -> str | None:
        """Reads a string; None if the field is null."""
        return self._or_none(name) and self.text(name)

    def optional_integer(self, name: str, *, minimum: int = 0) -> int | None:
        """Reads an integer of at least `minimum`; None if the field is null."""
        return self.integer(name, minimum=minimum) if self._or_none(name) else None

    def optional_number(self, name: str) -> float | None:
        """Reads a finite number; None if the field is null."""
        return self.number(name) if self._or_none(name) else None

    def nested(self, name: str) -> "Fields":
        """Reads a nested object."""
        return self.inner(name, self.take(name))

    def part(self, name: str) -> "Fields":
        """Reads a nested object; an empty one if the field is missing or null.

        A null stays unread, so that `done` refuses it.
        """
        return self.nested(name) if self.has(name) else self.inner(name, {})

    def inner(self, name: str, value: object) -> "Fields":
        """Returns `value`, which `take` gave for the field `name`, as a nested object.

        Raises the error if it is not an object.
        """
        return Fields(value, f"{self._where}: {name}", self._error)

    def nested_list(self, name: str) -> list["Fields"]:
        """Reads a list of nested objects."""
        value = self.take(name)
        if not isinstance(value, list):
            self.fail(f"{name} must be a list")
        items = cast(list[object], value)
        return [Fields(item, f"{self._where}: {name}[{i}]", self._error) for i, item in enumerate(items)]

    def read(self, name: str, reader: Callable[["Fields"], T]) -> T:
        """Reads a nested object with `reader`, which must read all of its fields."""
        return self.nested(name).whole(reader)

    def read_list(self, name: str, reader: Callable[["Fields"], T]) -> tuple[T, ...]:
        """Reads a list of nested objects, each as `read` does."""
        return tuple(one.whole(reader) for one in self.nested_list(name))

    def whole(self, reader: Callable[["Fields"], T]) -> T:
        """Returns what `reader` makes of this object. Raises the error if it has not read a field."""
        value = reader(self)
        self.done()
        return value

    def names(self) -> Iterator[str]:
        """Returns the names of the fields not read yet (a snapshot: fields may be read while iterating)."""
        return iter(list(self._left))

    def done(self) -> None:
        """Raises the error if a field was not read."""
        for name in self._left:
            self.fail(f"unknown field {name!r}")

    def _or_none(self, name: str) -> Any:
        """Reads a field that is null and returns None; True for one that is missing or has a value."""
        if name in self._left and self._left[name] is None:
            return self._left.pop(name)
        return True

    def _as_integer(self, value: object, name: str, minimum: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self.fail(f"{name} must be an integer of at least {minimum}")
        return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object of `pairs`. Raises ValueError if a name comes twice: `json` would take the last one."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} comes twice in one object")
    return fields
