"""Chooses the tokens of the next batch. Pure decisions over plain data."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A run with `missing` >= 1 tokens that a step may compute; `last_step` is the step that last computed some."""

    request_id: str
    missing: int
    quarantined: bool = False
    last_step: int = 0


def choose_tokens(
    candidates: Sequence[Candidate],
    max_rows: int,
    *,
    max_sequences: int | None = None,
    ragged: bool = True,
    max_decoding: int | None = None,
    prompt_tokens: int | None = None,
) -> list[tuple[str, int]]:
    """Chooses a batch: request ids with their numbers of tokens, each request once.

    At most `max_rows` rows of `max_sequences` requests. Empty if the limits leave nothing, such as `max_decoding` 0
    without prompts. Decode tokens (one token missing) come first, at most `max_decoding`, so that long prompts never
    hold up running requests. Prompt chunks share the rest, the longest waiting first, `prompt_tokens` at most. A limit
    that is None does not apply. Unless `ragged`, a batch has decode tokens alone, or chunks of equal length. A
    quarantined request gets a batch of its own once it has waited longest. No candidate starves: those left out have
    the lowest `last_step` next time.
    """
    waiting = sorted(candidates, key=lambda c: c.last_step)
    if waiting and waiting[0].quarantined:
        return [(waiting[0].request_id, min(waiting[0].missing, max_rows, prompt_tokens or max_rows))]
    together = [c for c in waiting if not c.quarantined]
    places = max_rows if max_sequences is None else min(max_rows, max_sequences)
    prompts = [c for c in together if c.missing > 1]
    decoding = [c for c in together if c.missing == 1][: places if max_decoding is None else max_decoding]
    if not ragged and decoding and prompts:  # the kind of the request that has waited longest
        decoding, prompts = ([], prompts) if together[0].missing > 1 else (decoding, [])
    if len(decoding) >= places and together[0].missing > 1:
        decoding = decoding[: places - 1]  # a prompt that has waited longest has a place
    chosen = [(c.request_id, 1) for c in decoding[:places]]
    room = max_rows - len(chosen)
    if prompt_tokens is not None:
        room = min(room, prompt_tokens)
    if not ragged and prompts:
        rows = min(prompts[0].missing, room)
        fitting = [c for c in prompts if c.missing >= rows][: room // max(1, rows)]
        return chosen + [(c.request_id, rows) for c in fitting[:places] if rows]
    for candidate in prompts:
        if room == 0 or len(chosen) == places:
            break
        rows = min(candidate.missing, room)
        chosen.append((candidate.request_id, rows))
        room -= rows
    return chosen


@dataclass(frozen=True, slots=True)
class Arrived:
    """A segment that waits in a later stage; `decodes`: it has one known token of a running request."""

    request_id: str
    rows: int
    decodes: bool


def choose_arrived(
    waiting: Sequence[Arrived],
    max_rows: int,
    prompt_tokens: int,
    *,
    tokens_alone: int | None = None,
    max_sequences: int | None = None,
    ragged: bool = True,
) -> list[int]:
    """Chooses a later stage's batch: indexes of `waiting` (in order of arrival), decodes first, then prompt chunks.

    Takes the oldest segment of each request; at most `max_rows` rows of `max_sequences` requests. Prompt chunks have at
    most `prompt_tokens` tokens beside decodes, `tokens_alone` without (None: `max_rows`). A segment is not cut: the
    first prompt chunk may exceed these two, and the first segment of a batch `max_rows` too. Unless `ragged`, all
    segments have as many tokens as the oldest.
    """
    heads: dict[str, int] = {}
    for index, segment in enumerate(waiting):
        heads.setdefault(segment.request_id, index)
    if not ragged:
        heads = {request_id: i for request_id, i in heads.items() if waiting[i].rows == waiting[0].rows}
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
    bound = min(max_rows, rows + prompt_tokens) if chosen else min(max_rows, tokens_alone or max_rows)
    for index in prompts:
        room = bound if len(chosen) > first_prompt else max_rows
        if chosen and (rows + waiting[index].rows > room or len(chosen) >= places):
            break
        chosen.append(index)
        rows += waiting[index].rows
    return chosen
