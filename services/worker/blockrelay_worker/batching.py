"""Which rows go into the next batch: pure decisions over plain data."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A run with `missing` >= 1 rows to compute; `served` is the iteration that last computed rows of it."""

    request: str
    missing: int
    solo: bool = False
    served: int = 0


def choose_rows(candidates: Sequence[Candidate], max_rows: int) -> list[tuple[str, int]]:
    """(request, rows) of one iteration, at most `max_rows` rows in all, each request once.

    Decode rows (one missing row) come first, so that long prompts never hold up running requests; prompt chunks share
    what is left in order of waiting. A solo request runs alone, in its turn: when it has waited longest.
    Every candidate is served at last: those left out have the lowest `served` next time.
    """
    waiting = sorted(candidates, key=lambda c: c.served)
    if waiting and waiting[0].solo:
        return [(waiting[0].request, min(waiting[0].missing, max_rows))]
    together = [c for c in waiting if not c.solo]
    chosen: list[tuple[str, int]] = []
    room = max_rows
    for candidate in [c for c in together if c.missing == 1] + [c for c in together if c.missing > 1]:
        if room == 0:
            break
        rows = min(candidate.missing, room)
        chosen.append((candidate.request, rows))
        room -= rows
    return chosen
