"""What rank 0 tells the others of a step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """A step of the stage for the other ranks: what they need beside the memory that all share."""

    rows: int
    segments: int
    pages: int
    """Width of the page table."""
    wanted: int
    first: int
    last: int
    """The blocks to run, both included."""
