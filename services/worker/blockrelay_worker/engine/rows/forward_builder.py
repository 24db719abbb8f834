"""From what a stage computed to the messages for the next one: one per worker, or several where tensors by name are too
much for one; segments in batch order."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from blockrelay.protocol.encoding.forward_segment import ForwardSegment
from blockrelay.protocol.encoding.named_tensors import MAX_MESSAGE_WEIGHT, NamedTensors, weight
from blockrelay.protocol.messages import Forward
from blockrelay_worker.engine.run import Run
from blockrelay_worker.engine.stage_role import StageRole
from blockrelay_worker.scheduling.work import Work

#: What a Work came to: rows float32 [n, H], or tensors by name.
Part = tuple[Work[Run], NDArray[np.float32] | Sequence[NamedTensors]]


def forwards(
    parts: Sequence[Part], seconds: dict[str, float], role: StageRole
) -> list[tuple[str, Forward, list[Work[Run]]]]:
    """(worker, message, what is in it) for each worker of the routes' next stage. Mutates `run.sent`."""
    targets: dict[str, list[Part]] = {}
    for part in parts:
        targets.setdefault(part[0].run.route[role.stage + 1], []).append(part)
    return [
        (target, _forward(group, seconds, role), [work for work, _ in group])
        for target, everything in targets.items()
        for group in _within_bounds(everything)
    ]


def _within_bounds(parts: Sequence[Part]) -> list[list[Part]]:
    """The parts in their order, cut where a message has no room for the next one; rows are as many as a batch has."""
    groups: list[list[Part]] = []
    weighs = 0
    for part in parts:
        own = 0 if isinstance(part[1], np.ndarray) else weight(part[1])
        if not groups or weighs + own > MAX_MESSAGE_WEIGHT:
            groups.append([])
            weighs = 0
        groups[-1].append(part)
        weighs += own
    return groups


def _forward(group: Sequence[Part], seconds: dict[str, float], role: StageRole) -> Forward:
    # Seconds of the blocks before are those of the group's first run: they ran in one batch, or nearly so.
    first = group[0][0].run
    rows = [made for _, made in group if isinstance(made, np.ndarray)]
    return Forward(
        sender=role.worker,
        segments=tuple(_segment(work) for work, _ in group),
        rows=np.concatenate(rows) if rows else None,
        tensors=[made for _, made in group if not isinstance(made, np.ndarray)],
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
