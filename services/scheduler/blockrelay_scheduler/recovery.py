"""The decisions which silent workers are dead and which requests are stuck. Pure.

`liveness` and `rescuer` read the data from Redis and perform the decisions. Every act is a conditional script, so a
decision that is out of date by the time it runs does nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from blockrelay_scheduler.policy import PROMPT_PATIENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedRequest:
    """A request that has not ended, as the key `running` and its record in Redis have it."""

    id: str
    state: str
    """"queued" or "running"; a request in any other state needs nothing."""
    run_id: str
    """The id of its current run."""
    idle_ms: int
    """Milliseconds since its last progress."""
    tokens: int = 0
    """Tokens that a run computes before it commits the first new one: the prompt and the committed ones."""
    overdue_ms: int | None = None
    """Milliseconds since its deadline, negative while there is time; None: it has no deadline."""
    denied_ms: int | None = None
    """Milliseconds that it has waited for a GPU after one failed and no CPU may take over; None: it does not wait."""


@dataclass(frozen=True, slots=True)
class Rescue:
    """An act on one stuck request: end its run and queue it again, or finish it as expired or for want of a GPU."""

    act: Literal["rerun", "expire", "give_up"]
    request_id: str
    run_id: str


def dead_workers(silent_ms: Mapping[str, int], *, dead_after_ms: int) -> list[str]:
    """Returns the ids of workers to declare dead: silent for `dead_after_ms` or longer, the most silent first.

    `silent_ms` has the milliseconds since the last heartbeat of each worker, by its id. A heartbeat that lies as far
    in the future is from before the clock was put back, and counts as silence.
    """
    silent = [worker_id for worker_id, silence in silent_ms.items() if abs(silence) >= dead_after_ms]
    return sorted(silent, key=lambda worker_id: (-abs(silent_ms[worker_id]), worker_id))


def patience_ms(tokens: int, *, stalled_after_s: float, prompt_tokens_per_s: float) -> int:
    """Milliseconds that a run of a request of `tokens` tokens may show no progress before it is stuck.

    It is `stalled_after_s` plus PROMPT_PATIENCE times the seconds of `tokens` tokens at `prompt_tokens_per_s`.
    """
    return int(1000 * (stalled_after_s + PROMPT_PATIENCE * tokens / prompt_tokens_per_s))


def rescues(
    requests: Sequence[UnfinishedRequest],
    *,
    stalled_after_s: float,
    prompt_tokens_per_s: float,
    fallback_wait_s: float,
) -> list[Rescue]:
    """Returns what to do with unfinished requests; those that need nothing are left out.

    A passed deadline comes first. A running request that shows no progress for its `patience_ms` is run again, whatever
    state its workers report.
    A queued request waits without limit, except for a GPU that alone may serve it: then `fallback_wait_s` seconds.
    """
    acts: list[Rescue] = []
    for r in requests:
        if r.state not in ("queued", "running"):
            continue
        if r.overdue_ms is not None and r.overdue_ms > 0:
            acts.append(Rescue("expire", r.id, r.run_id))
        elif r.state == "queued" and r.denied_ms is not None and r.denied_ms > 1000 * fallback_wait_s:
            acts.append(Rescue("give_up", r.id, r.run_id))
        elif r.state == "running" and r.idle_ms > patience_ms(
            r.tokens, stalled_after_s=stalled_after_s, prompt_tokens_per_s=prompt_tokens_per_s
        ):
            acts.append(Rescue("rerun", r.id, r.run_id))
    return acts
