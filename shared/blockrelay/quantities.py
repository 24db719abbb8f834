"""Bytes, rates, counts and times as people write and read them: `24GB`, `900GB/s`, `310 MB`. Powers of 1000."""

import re
from math import isfinite

from blockrelay.errors import UsageError

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_WRITTEN = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kKMGTP]?)(i?)")


def parse_quantity(text: str, unit: str, *, where: str) -> float:
    """`24GB`, `24 GiB` (powers of 1024) or `24000000000B` for the unit `B`. UsageError names `where` it stands."""
    stem = text.removesuffix(unit)
    found = _WRITTEN.fullmatch(stem) if stem != text else None
    if found is None or (found[3] and not found[2]):
        raise UsageError(f"{where}: {text!r} is not a quantity such as 24G{unit}")
    letter = found[2].replace("K", "k")
    value = float(found[1]) * (1024 ** ("kMGTP".index(letter) + 1) if found[3] else _UNITS[letter])
    if not isfinite(value):
        raise UsageError(f"{where}: {text[:20]}... is beyond all numbers")
    return value


def format_quantity(value: float, unit: str = "") -> str:
    """Three digits and a letter: `310 MB`, `1.24 G`; whole numbers below 1000 as they are."""
    size = abs(value)
    letter = next((letter for letter, factor in reversed(_UNITS.items()) if size >= factor and factor > 1), "")
    scaled = value / _UNITS[letter]
    digits = f"{scaled:.3g}" if abs(scaled) < 999.5 else f"{scaled:.0f}"
    return f"{digits} {letter}{unit}".rstrip()


def format_seconds(seconds: float) -> str:
    """Three digits: `1.24 s`, `310 ms`, `40 µs`, from 1000 s on `59.3 min`, from two hours on `2.5 h`."""
    if seconds >= 999.5:
        return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.4g} h"
    if seconds and seconds < 0.9995e-3:
        return f"{1e6 * seconds:.3g} µs"
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def counted(number: int, noun: str) -> str:
    """`1 part`, `2 parts`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
