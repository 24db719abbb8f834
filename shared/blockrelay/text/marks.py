"""Finds texts that may go on as a mark: a stop string, or what a reasoning or a tool call begins with. Pure."""

from collections.abc import Sequence


def possible_start(text: str, marks: Sequence[str]) -> int:
    """Returns the length of the longest end of `text` with which some mark begins, and is longer; 0 for none."""
    longest = min(len(text), max(map(len, marks)) - 1)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(len(mark) > length and mark.startswith(end) for mark in marks):
            return length
    return 0
