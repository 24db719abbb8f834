"""Parses and formats figures for people: bytes, rates, counts and times (`24GB`, `310 MB`), and columns of text.

Letters are powers of 1000.
"""

import re
from collections.abc import Sequence
from math import isfinite

from blockrelay.errors import UsageError

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_WRITTEN = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kKMGTP]?)(i?)")


def parse_quantity(text: str, unit: str, *, where: str) -> float:
    """Returns the number of units in `text`; for the unit `B`: `24GB`, `24 GiB` (powers of 1024), `24000000000B`.

    `text` ends in `unit`, which is not empty. Raises UsageError, whose message begins with `where`, if `text` is no
    such quantity or its value is too large. `where` names the source of `text`, for example an option.
    """
    stem = text.removesuffix(unit)
    match = _WRITTEN.fullmatch(stem) if stem != text else None
    if match is None or (match[3] and not match[2]):
        raise UsageError(f"{where}: {text!r} is not a quantity such as 24G{unit}")
    letter = match[2].replace("K", "k")
    value = float(match[1]) * (1024 ** ("kMGTP".index(letter) + 1) if match[3] else _UNITS[letter])
    if not isfinite(value):
        raise UsageError(f"{where}: {text[:20]}... is too large a number")
    return value


def format_quantity(value: float, unit: str = "") -> str:
    """Returns a value with three digits and a letter: `310 MB`, `1.24 G`; whole numbers below 1000 unchanged."""
    size = abs(value)
    letter = next((letter for letter, factor in reversed(_UNITS.items()) if size >= factor and factor > 1), "")
    scaled = value / _UNITS[letter]
    digits = f"{scaled:.3g}" if abs(scaled) < 999.5 else f"{scaled:.0f}"
    return f"{digits} {letter}{unit}".rstrip()


def format_seconds(seconds: float) -> str:
    """Returns a time with three digits: `1.24 s`, `310 ms`, `40 µs`; from 1000 s `59.3 min`, from two hours `2.5 h`."""
    if seconds >= 999.5:
        return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.4g} h"
    if seconds and seconds < 0.9995e-3:
        return f"{1e6 * seconds:.3g} µs"
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: `1 part`, `2 parts`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Returns `rows`, which all have the same number of cells, as lines of aligned columns; the last is not padded."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    )
