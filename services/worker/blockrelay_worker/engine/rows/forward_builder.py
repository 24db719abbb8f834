"""Builds the messages to the next stage from a stage's output.

One message per worker, or several if named tensors do not fit into one; segments are in batch order.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from blockrelay.protocol.encoding.forward_segment import ForwardSegment
from blockrelay.protocol.encoding.named_tensors import MAX_MESSAGE_WEIGHT, NamedTensors, weight
from blockrelay.protocol.messages import Forward
from blockrelay_worker.engine.stage_role import StageRole
from blockrelay_worker.scheduling.work import Work

#: A Work and its output: rows float32 [n, H], or named tensors.
Part = tuple[Work, NDArray[np.float32] | Sequence[NamedTensors]]


def forwards(
    parts: Sequence[Part], seconds: dict[str, float], role: StageRole
) -> list[tuple[str, Forward, list[Work]]]:
    """Messages to the workers of the next stage, each with the worker's id and the Work in it. Changes `run.sent`.

    `seconds`: the wall time of each block of this stage in this batch, by block name. The parts are all rows or all
    named tensors; the caller has left out tensors that no message can hold (`why_not_sent`). Not for the last stage.
    """
    targets: dict[str, list[Part]] = {}
    for part in parts:
        targets.setdefault(part[0].run.route[role.stage + 1], []).append(part)
    return [
        (target, _forward(group, seconds, role), [work for work, _ in group])
        for target, everything in targets.items()
        for group in _within_bounds(everything)
    ]


def _within_bounds(parts: Sequence[Part]) -> list[list[Part]]:
    """The parts in their order, in groups that fit into one message. Hidden rows always fit: the batch bounds them."""
    groups: list[list[Part]] = []
    group_weight = 0
    for part in parts:
        part_weight = 0 if isinstance(part[1], np.ndarray) else weight(part[1])
        if not groups or group_weight + part_weight > MAX_MESSAGE_WEIGHT:
            groups.append([])
            group_weight = 0
        groups[-1].append(part)
        group_weight += part_weight
    return groups


def _forward(group: Sequence[Part], seconds: dict[str, float], role: StageRole) -> Forward:
    # One run's block seconds stand for the group: the earlier stages computed it in one batch, or nearly so.
    first = group[0][0].run
    rows = [output for _, output in group if isinstance(output, np.ndarray)]
    return Forward(
        sender=role.worker_id,
        segments=tuple(_segment(work) for work, _ in group),
        rows=np.concatenate(rows) if rows else None,
        tensors=[output for _, output in group if not isinstance(output, np.ndarray)],
        block_seconds={**first.block_seconds_before, **seconds},
        gpu_blocks=first.gpu_blocks_before + role.gpu_blocks,
    )


def _segment(work: Work) -> ForwardSegment:
    """The segment of a message for one Work. Changes `run.sent`."""
    run = work.run
    run.sent += 1
    return ForwardSegment(
        request_id=run.request_id,
        run_id=run.run_id,
        sequence=run.sent - 1,
        position=work.position,
        token_ids=tuple(work.tokens),
        ends_known=work.samples,
        drafts=work.drafts,
    )
