"""Which silent workers to declare dead and which requests are stuck, longer allowed for long prompts. Pure: what Redis
says in, acts out; `liveness` and `rescuer` perform them.

Every act is a conditional script, so a decision that is out of date by the time it runs does nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from blockrelay_scheduler.policy import PROMPT_PATIENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedRequest:
    """One member of the `running` set.

    `idle_ms` since its run or its log last moved; `tokens` that a run must compute before it commits anything (prompt
    and committed ones); `overdue_ms` since its deadline, negative or None while there is time; `denied_ms` for which it
    has waited for a GPU, since no CPU may take the failed one's place (None: it does not).
    """

    id: str
    state: str
    run: str
    idle_ms: int
    tokens: int = 0
    overdue_ms: int | None = None
    denied_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Rescue:
    """What to do with a request: RERUN its current run, FINISH it as expired, or for want of a GPU."""

    act: Literal["rerun", "expire", "give_up"]
    request: str
    run: str


def dead_workers(silent_ms: Mapping[str, int], *, dead_after_ms: int) -> list[str]:
    """Workers to declare dead: silent for `dead_after_ms` or longer, most silent first.

    A beat that lies as far in the future is from before the clock was put back.
    """
    silent = [worker for worker, silence in silent_ms.items() if abs(silence) >= dead_after_ms]
    return sorted(silent, key=lambda worker: (-abs(silent_ms[worker]), worker))


def patience_ms(tokens: int, *, stalled_after_s: float, prompt_tokens_per_s: float) -> int:
    """How long a run of a request of `tokens` tokens may show no progress."""
    return int(1000 * (stalled_after_s + PROMPT_PATIENCE * tokens / prompt_tokens_per_s))


def rescues(
    requests: Sequence[UnfinishedRequest],
    *,
    stalled_after_s: float,
    prompt_tokens_per_s: float,
    fallback_wait_s: float,
) -> list[Rescue]:
    """What to do with unfinished requests.

    A deadline comes first. A running one without progress is run again, whatever its workers say; a queued one waits
    for as long as it takes, unless it waits for a GPU alone.
    """
    found: list[Rescue] = []
    for r in requests:
        if r.state not in ("queued", "running"):
            continue
        if r.overdue_ms is not None and r.overdue_ms > 0:
            found.append(Rescue("expire", r.id, r.run))
        elif r.state == "queued" and r.denied_ms is not None and r.denied_ms > 1000 * fallback_wait_s:
            found.append(Rescue("give_up", r.id, r.run))
        elif r.state == "running" and r.idle_ms > patience_ms(
            r.tokens, stalled_after_s=stalled_after_s, prompt_tokens_per_s=prompt_tokens_per_s
        ):
            found.append(Rescue("rerun", r.id, r.run))
    return found
