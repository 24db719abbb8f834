"""A later stage's rows: what the stage before sent, in order, each request once per batch."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockrelay.protocol.messages import Forward, ForwardSegment
from blockrelay_worker.engine.intake import Arrivals
from blockrelay_worker.engine.work import Work
from blockrelay_worker.lifecycle.stage_role import StageRole
from blockrelay_worker.scheduling.batch_policy import Arrived, choose_arrived
from blockrelay_worker.scheduling.step_cost import StepCost, prompt_rows_beside


@dataclass(frozen=True, slots=True)
class Waiting:
    """Rows of one segment that arrived and were not computed yet, and the message they came with."""

    segment: ForwardSegment
    hidden: NDArray[np.float32]
    message: Forward

    @property
    def arrived(self) -> Arrived:
        segment = self.segment
        rows = len(segment.token_ids)
        return Arrived(segment.request, rows, segment.ends_known and rows == 1 + segment.drafts)


class ArrivedRows:
    """Makes the batches of a later stage. Used by the engine thread only."""

    def __init__(self, role: StageRole, arrivals: Arrivals) -> None:
        self._role, self._arrivals = role, arrivals
        self._waiting: list[Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, message: Forward) -> None:
        at = 0
        for segment in message.segments:
            end = at + len(segment.token_ids)
            self._waiting.append(Waiting(segment, message.rows[at:end], message))
            at = end

    def clear(self) -> None:
        self._waiting.clear()

    def take(self, cost: StepCost) -> tuple[list[Work], list[ForwardSegment]]:
        """The next batch, and segments whose runs must run again because their pages are missing."""
        prompt_rows = prompt_rows_beside(cost, self._role.step_share_s, self._role.max_rows)
        chosen = choose_arrived([w.arrived for w in self._waiting], self._role.max_rows, prompt_rows)
        items = [self._waiting[i] for i in chosen]
        taken = set(chosen)
        self._waiting = [w for i, w in enumerate(self._waiting) if i not in taken]
        work: list[Work] = []
        refused: list[ForwardSegment] = []
        later: list[Waiting] = []
        for item in items:
            segment, run = item.segment, self._arrivals.segment(item.segment)
            if run == "rerun":
                refused.append(segment)
            elif run == "later":
                later.append(item)
            elif run != "drop":
                run.passing, run.gpu_blocks = item.message.block_seconds, item.message.gpu_blocks
                work.append(
                    Work(
                        run=run,
                        position=segment.position,
                        tokens=segment.token_ids,
                        hidden=item.hidden,
                        samples=segment.ends_known,
                        drafts=segment.drafts,
                    )
                )
        self._waiting[:0] = later
        return work, refused
