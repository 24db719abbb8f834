"""Estimates the memory of parsed JSON from the bytes of its text. Pure."""

import numpy as np

#: Bytes in CPython of the object that a character of the text begins or ends: a dict, a list, an item with a number in
#: it, a key with its place in a table, half of a string.
_WEIGHTS = {ord("{"): 64, ord("["): 56, ord(","): 41, ord(":"): 60, ord('"'): 28}


def parsed_bytes(raw: bytes) -> int:
    """Estimates the bytes of `json.loads(raw)` with its decoded text, seldom too low; JSON inside strings counts too.

    It counts with NumPy: `bytes.count` takes 30 ms for a body of 8 MiB that holds nothing but braces, and holds the
    GIL.
    """
    characters = np.frombuffer(raw, np.uint8)
    values = sum(weight * int(np.count_nonzero(characters == code)) for code, weight in _WEIGHTS.items())
    return 2 * len(raw) * _width(raw, characters) + values


def _width(raw: bytes, characters: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    """Bytes per character of the decoded text, which its widest character decides."""
    if b"\\u" in raw:
        return 4
    highest = int(characters.max(initial=0))
    return 1 if highest < 0xC4 else 2 if highest < 0xF0 else 4
