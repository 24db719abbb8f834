"""From the rows that a stage computed to the messages for the next one: one per worker, segments in batch order."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from blockrelay.protocol.messages import Forward, ForwardSegment
from blockrelay_worker.engine.run import Run
from blockrelay_worker.engine.stage_role import StageRole
from blockrelay_worker.scheduling.work import Work

#: Rows float32 [n, H] that a Work came to.
Part = tuple[Work[Run], NDArray[np.float32]]


def forwards(
    parts: Sequence[Part], seconds: dict[str, float], role: StageRole
) -> list[tuple[str, Forward, list[Work[Run]]]]:
    """(worker, message, what is in it) for each worker of the routes' next stage. Mutates `run.sent`."""
    targets: dict[str, list[Part]] = {}
    for part in parts:
        targets.setdefault(part[0].run.route[role.stage + 1], []).append(part)
    return [(target, _forward(group, seconds, role), [work for work, _ in group]) for target, group in targets.items()]


def _forward(group: Sequence[Part], seconds: dict[str, float], role: StageRole) -> Forward:
    # Seconds of the blocks before are those of the group's first run: they ran in one batch, or nearly so.
    first = group[0][0].run
    return Forward(
        sender=role.worker,
        segments=tuple(_segment(work) for work, _ in group),
        rows=np.concatenate([rows for _, rows in group]),
        block_seconds={**first.block_seconds_before, **seconds},
        gpu_blocks=first.gpu_blocks_before + role.gpu_blocks,
    )


def _segment(work: Work[Run]) -> ForwardSegment:
    run = work.run
    run.sent += 1
    return ForwardSegment(
        request=run.request,
        run=run.id,
        sequence=run.sent - 1,
        position=work.position,
        token_ids=tuple(work.tokens),
        ends_known=work.samples,
        drafts=work.drafts,
    )
