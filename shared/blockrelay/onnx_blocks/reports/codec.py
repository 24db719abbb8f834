"""Writes and reads reports on ONNX blocks: a dataclass as one line of JSON."""

import json
import sys
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from blockrelay.errors import WireError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic import TypeAdapter

T = TypeVar("T")


def encode(report: "DataclassInstance") -> str:
    """Returns a report as one line of JSON, without the line's end."""
    return json.dumps(asdict(report))


def send(report: "DataclassInstance") -> None:
    """Writes a report to stdout at once, because the process that reads it shows progress."""
    sys.stdout.write(f"{encode(report)}\n")
    sys.stdout.flush()


def decode(kind: type[T], line: bytes) -> T:
    """Returns the report in `line`; `kind` is its dataclass.

    Every value must have the type of its field. Unknown fields are ignored. Raises WireError for anything else.
    """
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_json(line, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"{part}: " for part in first["loc"])
        raise WireError(f"a line is no {kind.__name__}: {place}{first['msg']}") from None


@cache
def _adapter(kind: type[T]) -> "TypeAdapter[T]":
    from pydantic import TypeAdapter  # imported here: commands that read no reports start faster without it

    return TypeAdapter(kind)
