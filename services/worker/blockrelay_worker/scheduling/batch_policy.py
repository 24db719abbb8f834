"""Which rows go into the next batch: pure decisions over plain data."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A run with `missing` >= 1 rows to compute; `last_step` is the step that last computed rows of it."""

    request: str
    missing: int
    quarantined: bool = False
    last_step: int = 0


def choose_rows(
    candidates: Sequence[Candidate],
    max_rows: int,
    *,
    max_decoding: int | None = None,
    prompt_rows: int | None = None,
) -> list[tuple[str, int]]:
    """(request, rows) of one iteration, at most `max_rows` rows in all, each request once.

    Decode rows (one missing row) come first, at most `max_decoding` of them, so that long prompts never hold up
    running requests; prompt chunks share what is left in order of waiting, `prompt_rows` at most.
    A quarantined request runs alone, in its turn: when it has waited longest.
    Every candidate is served at last: those left out have the lowest `last_step` next time.
    """
    waiting = sorted(candidates, key=lambda c: c.last_step)
    if waiting and waiting[0].quarantined:
        return [(waiting[0].request, min(waiting[0].missing, max_rows))]
    together = [c for c in waiting if not c.quarantined]
    decoding = [c for c in together if c.missing == 1][: max_rows if max_decoding is None else max_decoding]
    chosen = [(c.request, 1) for c in decoding[:max_rows]]
    room = max_rows - len(chosen)
    if prompt_rows is not None:
        room = min(room, prompt_rows)
    for candidate in [c for c in together if c.missing > 1]:
        if room == 0:
            break
        rows = min(candidate.missing, room)
        chosen.append((candidate.request, rows))
        room -= rows
    return chosen


@dataclass(frozen=True, slots=True)
class Arrived:
    """A segment that waits in a later stage; `decodes`: it continues a running request."""

    request: str
    rows: int
    decodes: bool


def choose_arrived(waiting: Sequence[Arrived], max_rows: int, prompt_rows: int) -> list[int]:
    """Indexes of `waiting` (in order of arrival) for one iteration: decoding segments first, then prompt chunks.

    One segment per request, its oldest; at most `max_rows` rows and, beside decoding ones, about `prompt_rows` of
    prompts, but never nothing: a segment is not cut, so one may be alone over the bound.
    """
    heads: dict[str, int] = {}
    for index, segment in enumerate(waiting):
        heads.setdefault(segment.request, index)
    decoding = [i for i in heads.values() if waiting[i].decodes]
    chosen: list[int] = []
    rows = 0
    for index in decoding:
        if rows + waiting[index].rows > max_rows and chosen:
            return chosen
        chosen.append(index)
        rows += waiting[index].rows
    bound = min(max_rows, rows + prompt_rows) if chosen else max_rows
    for index in [i for i in heads.values() if not waiting[i].decodes]:
        room = bound if len(chosen) > len(decoding) else max_rows
        if chosen and rows + waiting[index].rows > room:
            break
        chosen.append(index)
        rows += waiting[index].rows
    return chosen
