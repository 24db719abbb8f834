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
    max_sequences: int | None = None,
    ragged: bool = True,
    max_decoding: int | None = None,
    prompt_rows: int | None = None,
) -> list[tuple[str, int]]:
    """(request, rows) of one iteration, at most `max_rows` rows of `max_sequences` requests, each request once.

    Decode rows (one missing row) come first, at most `max_decoding` of them, so that long prompts never hold up
    running requests; prompt chunks share what is left in order of waiting, `prompt_rows` at most. Unless it may be
    `ragged`, the batch has either the one or chunks of the same length.
    A quarantined request runs alone, in its turn: when it has waited longest.
    Every candidate is served at last: those left out have the lowest `last_step` next time.
    """
    waiting = sorted(candidates, key=lambda c: c.last_step)
    if waiting and waiting[0].quarantined:
        return [(waiting[0].request, min(waiting[0].missing, max_rows, prompt_rows or max_rows))]
    together = [c for c in waiting if not c.quarantined]
    places = max_rows if max_sequences is None else min(max_rows, max_sequences)
    prompts = [c for c in together if c.missing > 1]
    decoding = [c for c in together if c.missing == 1][: places if max_decoding is None else max_decoding]
    if not ragged and decoding and prompts:  # who has waited longest says which of the two
        decoding, prompts = ([], prompts) if together[0].missing > 1 else (decoding, [])
    if len(decoding) >= places and together[0].missing > 1:
        decoding = decoding[: places - 1]  # a prompt that has waited longest has a place
    chosen = [(c.request, 1) for c in decoding[:places]]
    room = max_rows - len(chosen)
    if prompt_rows is not None:
        room = min(room, prompt_rows)
    if not ragged and prompts:
        rows = min(prompts[0].missing, room)
        fitting = [c for c in prompts if c.missing >= rows][: room // max(1, rows)]
        return chosen + [(c.request, rows) for c in fitting[:places] if rows]
    for candidate in prompts:
        if room == 0 or len(chosen) == places:
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


def choose_arrived(
    waiting: Sequence[Arrived],
    max_rows: int,
    prompt_rows: int,
    *,
    rows_alone: int | None = None,
    max_sequences: int | None = None,
    ragged: bool = True,
) -> list[int]:
    """Indexes of `waiting` (in order of arrival) for one iteration: decoding segments first, then prompt chunks.

    One segment per request, its oldest; at most `max_rows` rows of `max_sequences` requests and, of prompts, about
    `prompt_rows` beside decoding ones and `rows_alone` without, but never nothing: a segment is not cut, so one may be
    alone over the bound. Unless the batch may be `ragged`, all have as many rows as the oldest.
    """
    heads: dict[str, int] = {}
    for index, segment in enumerate(waiting):
        heads.setdefault(segment.request, index)
    if not ragged:
        heads = {request: i for request, i in heads.items() if waiting[i].rows == waiting[0].rows}
    places = len(heads) if max_sequences is None else max_sequences
    decoding = [i for i in heads.values() if waiting[i].decodes]
    prompts = [i for i in heads.values() if not waiting[i].decodes]
    if len(decoding) >= places and prompts and prompts[0] < decoding[0]:
        decoding = decoding[: places - 1]  # a prompt that has waited longest has a place
    chosen: list[int] = []
    rows = 0
    for index in decoding[:places]:
        if rows + waiting[index].rows > max_rows and chosen:
            return chosen
        chosen.append(index)
        rows += waiting[index].rows
    first_prompt = len(chosen)
    bound = min(max_rows, rows + prompt_rows) if chosen else min(max_rows, rows_alone or max_rows)
    for index in prompts:
        room = bound if len(chosen) > first_prompt else max_rows
        if chosen and (rows + waiting[index].rows > room or len(chosen) >= places):
            break
        chosen.append(index)
        rows += waiting[index].rows
    return chosen
