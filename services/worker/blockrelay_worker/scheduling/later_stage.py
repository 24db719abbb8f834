"""Makes the batches of a later stage from the rows that the stage before sent, each request once per batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from blockrelay.protocol.encoding.forward_segment import ForwardSegment
from blockrelay.protocol.messages import Forward
from blockrelay_worker.execution.batch import NamedTensors
from blockrelay_worker.runs.run import Run
from blockrelay_worker.scheduling.batch_policy import Arrived, choose_arrived
from blockrelay_worker.scheduling.limits import BatchLimits
from blockrelay_worker.scheduling.step_cost import StepCost, prompt_tokens_alone, prompt_tokens_beside
from blockrelay_worker.scheduling.work import Work

#: Why rows are not computed: "drop" them, "rerun" their request, or try again "later".
Refusal = Literal["drop", "rerun", "later"]
#: Returns the run of a segment of a message, with KV pages for its rows; or why there is none.
RunOf = Callable[[ForwardSegment, Forward], Run | Refusal]


@dataclass(frozen=True, slots=True)
class Waiting(Arrived):
    """A segment that was not computed yet, with its message and its rows: `hidden`, or named `tensors`."""

    segment: ForwardSegment
    hidden: NDArray[np.float32] | None
    tensors: Sequence[NamedTensors]
    message: Forward


class LaterStageBatcher:
    """Makes the batches of a later stage. Used by the engine thread only.

    `run_of` is called for each segment of a chosen batch. It may wait for Redis.
    """

    def __init__(self, limits: BatchLimits, run_of: RunOf) -> None:
        self._limits, self._run_of = limits, run_of
        self._waiting: list[Waiting] = []

    def add(self, message: Forward) -> None:
        """Queues the segments of a message."""
        at = 0
        for index, segment in enumerate(message.segments):
            rows = len(segment.token_ids)
            hidden = None if message.rows is None else message.rows[at : at + rows]
            tensors = message.tensors[index] if message.rows is None else ()
            decodes = segment.ends_known and rows == 1 + segment.drafts
            self._waiting.append(Waiting(segment.request_id, rows, decodes, segment, hidden, tensors, message))
            at += rows

    def clear(self) -> None:
        """Drops all queued segments."""
        self._waiting.clear()

    def take(self, cost: StepCost) -> tuple[list[Work], list[ForwardSegment]]:
        """Returns the next batch, and the segments whose requests must run again since rows or pages are missing.

        `cost` is the measured cost of steps here. Segments for which `run_of` returns "later" stay in the queue, and
        others are chosen instead; those for which it returns "drop" are in neither list. The batch may be empty. Raises
        what `run_of` raises.
        """
        work: list[Work] = []
        refused: list[ForwardSegment] = []
        later: list[Waiting] = []
        while not work:
            waiting = len(later)
            for item in self._chosen(cost):
                segment, run = item.segment, self._run_of(item.segment, item.message)
                if run == "rerun":
                    refused.append(segment)
                elif run == "later":
                    later.append(item)
                elif run != "drop":
                    work.append(
                        Work(
                            run=run,
                            position=segment.position,
                            tokens=segment.token_ids,
                            hidden=item.hidden,
                            tensors=item.tensors,
                            samples=segment.ends_known,
                            drafts=segment.drafts,
                        )
                    )
            if len(later) == waiting:
                break
        self._waiting[:0] = later
        return work, refused

    def _chosen(self, cost: StepCost) -> list[Waiting]:
        """Takes the segments of the next batch from the queue."""
        limits = self._limits
        prompt_tokens = prompt_tokens_beside(cost, limits.step_share_s, limits.max_rows)
        chosen = choose_arrived(
            self._waiting,
            limits.max_rows,
            prompt_tokens,
            tokens_alone=prompt_tokens_alone(cost, limits.chunk_s, limits.max_rows),
            max_sequences=limits.max_sequences,
            ragged=limits.ragged,
        )
        items = [self._waiting[i] for i in chosen]
        taken = set(chosen)
        self._waiting = [w for i, w in enumerate(self._waiting) if i not in taken]
        return items
