"""Checks a change of a running cell to another precision, and says what it needs. Pure."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blockrelay.errors import UsageError
from blockrelay.protocol.plan import GPU, Plan, WorkerInfo, succeeded
from blockrelay.protocol.served_folder import ServedFolder
from blockrelay.quantities import format_quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Precisions:
    """The precisions of a running cell."""

    model: str
    """The model's key, which is that of the folder with which its workers started."""
    wanted: str
    """Key of the folder that the plan gives all workers."""
    available: Mapping[str, ServedFolder]
    """The folders that some worker can serve, by key."""
    serving: Mapping[str, tuple[str, ...]]
    """Ids of the workers that serve each folder, by key; also of those that finish their requests first."""
    pending: tuple[str, ...]
    """Ids of the workers that do not serve the wanted folder yet, or still load it."""
    short: tuple[str, ...]
    """Ids of those that lack memory for it; they are not pending."""

    def name_of(self, key: str) -> str:
        """Returns the precision of a folder, "" for that with which workers started; its key where none says it."""
        key = key or self.model
        return self.available[key].precision if key in self.available else key


def precisions_of(workers: Sequence[WorkerInfo], plan: Plan, model: str) -> Precisions:
    """Returns the precisions that the live `workers` of a model serve and can serve, beside that of the plan."""
    wanted = plan.folder or model
    alive = [worker for worker in workers if worker.is_alive]
    serving: dict[str, list[str]] = defaultdict(list)
    for worker in alive:
        if worker.ready and worker.folder:
            serving[worker.folder].append(worker.id)
    return Precisions(
        model=model,
        wanted=wanted,
        available={one.key: one for worker in alive for one in worker.folders},
        serving={key: tuple(ids) for key, ids in serving.items()},
        pending=tuple(
            worker.id
            for worker in alive
            if worker.folder_with(wanted)
            and not (worker.ready and worker.folder == wanted)
            and not worker.draining
            and worker.state != "short"
        ),
        short=tuple(worker.id for worker in alive if worker.state == "short"),
    )


def check_change(workers: Sequence[WorkerInfo], plan: Plan, model: str, precision: str) -> ServedFolder:
    """Returns the folder of `precision`, to which all live workers of the model can change.

    Raises UsageError, one line: for a precision that a worker does not have, while another change goes on, and for a
    worker whose machine has no memory for its part of it.
    """
    now = precisions_of(workers, plan, model)
    if (folder := now.available.get(plan.folder or model)) and precision in (folder.precision, folder.key):
        return folder  # it is in force already
    found = [folder for folder in now.available.values() if precision in (folder.precision, folder.key)]
    if not found:
        have = ", ".join(sorted({folder.precision for folder in now.available.values()}))
        raise UsageError(
            f"no worker has a folder of precision {precision} (there is {have or 'none'}): start workers with "
            "--other-precision DIR"
        )
    folder = found[0]
    if now.pending:
        raise UsageError(
            f"a change to {now.name_of(now.wanted)} is not over: {now.pending[0]} does not serve it yet; wait until "
            "`blockrelay precision` shows that all do"
        )
    check_folder(workers, folder)
    return folder


def check_folder(workers: Sequence[WorkerInfo], folder: ServedFolder) -> None:
    """Raises UsageError, one line, where a live worker does not have the folder, or no memory for its part of it."""
    serving = staying(workers)
    if lacking := [one for one in serving if one.ready and one.folder_with(folder.key) is None]:
        where = f" on {lacking[0].device_id}" if lacking[0].device_id else ""
        raise UsageError(
            f"worker {lacking[0].id}{where} does not have {folder.precision} ({folder.key}), or its device refuses it: "
            "start it with --other-precision DIR, or see FOLDER_REFUSED in its log"
        )
    if lack := check_memory(serving, folder):
        lacking = format_quantity(lack.bytes, "B")
        raise UsageError(
            f"worker {lack.worker} could not hold its part of {folder.precision}: {lack.where} lacks {lack.bytes} "
            f"bytes ({lacking}) for its weights and KV pages of one request; add memory, or use more machines"
        )


def staying(workers: Sequence[WorkerInfo]) -> list[WorkerInfo]:
    """Returns the live workers that neither drain nor have a successor."""
    leaving = succeeded(workers)
    return [one for one in workers if one.is_alive and not one.draining and one.id not in leaving]


@dataclass(frozen=True, slots=True)
class Shortage:
    """Memory that a machine, or a GPU, lacks for its stages of a folder."""

    worker: str
    """Id of one of its workers."""
    where: str
    """Name of the machine, or of the GPU and its machine."""
    bytes: int


def check_memory(workers: Sequence[WorkerInfo], folder: ServedFolder, *, margin: float = 1.0) -> Shortage | None:
    """Returns what a machine, or a GPU, lacks for its stages of `folder`, once its workers have left theirs.

    None: nothing. A stage needs its weights, and KV pages for one request of full length, or as many as it has on its
    GPU, times `margin`. Counted are workers that stay and serve another folder, and those that lack memory for the one
    that the plan gives them.
    """
    by_place: dict[tuple[str, ...], list[WorkerInfo]] = defaultdict(list)
    for worker in staying(workers):
        if worker.short_of or (worker.stage is not None and worker.folder != folder.key):
            device = (worker.device_id, str(worker.pid)) if worker.device == GPU else ()
            by_place[worker.node, *device].append(worker)
    for (node, *device), moving in by_place.items():
        needed = sum(one.bytes for worker in moving if (one := worker.folder_with(folder.key)))
        room = min(worker.free_bytes for worker in moving) + sum(worker.held_bytes for worker in moving)
        if needed * margin > room:
            where = f"{device[0]} of {node}" if device else node
            return Shortage(moving[0].id, where, math.ceil(needed * margin) - room)
    return None
