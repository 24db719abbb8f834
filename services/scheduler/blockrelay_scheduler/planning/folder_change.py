"""Decides which block folder each worker serves while a cell changes from one precision to another. Pure.

Some workers of each stage change first, so that the others still form routes of the old precision and take the requests
over that those had begun. Where a stage has one worker left, all change together: each goes on with the requests that
it has begun, and leaves when these have ended. CPUs change before GPUs, whose requests new workers can then take. The
workers of a device, which has memory for one folder at a time, change together.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from blockrelay.protocol.plan import GPU, Plan, WorkerInfo


def other_folders(
    workers: Sequence[WorkerInfo], stages: Mapping[str, int], *, folder: str, current: Plan | None
) -> dict[str, str]:
    """Returns the keys of block folders, by worker id, of those workers that are not to serve `folder` yet.

    `stages` has the stage index of each worker, and `folder` is the key of a folder, or "" for that with which workers
    started. `current` is the plan in force. Half of what a stage has left (CPU workers and devices) changes at once,
    and the next ones when these serve. A worker that does not have the folder keeps its own.
    """
    unable = {w.id: w.folder for w in workers if w.folders and w.folder_with(folder) is None}
    placed = [w for w in workers if w.id in stages and w.id not in unable]
    before = {w.id: w for w in placed if w.stage is not None and w.folder not in ("", folder or w.model)}
    has_begun = current is not None and current.folder == folder
    told = set(current.other_folders) if current else set[str]()
    moving = {_place(worker) for worker in placed if worker.id not in told}
    kept = {name: one.folder for name, one in before.items() if name in told and _place(one) not in moving}
    if has_begun and len(kept) < len(before):
        return {**unable, **kept}
    if any(worker.state == "loading" for worker in placed):
        return {**unable, **(kept if has_begun else {name: one.folder for name, one in before.items()})}
    since: dict[str, int] = {}
    for worker in before.values():
        since[_place(worker)] = min(worker.registered_ms, since.get(_place(worker), worker.registered_ms))
    left: dict[int, list[str]] = defaultdict(list)
    for worker in sorted(before.values(), key=lambda w: (w.device == GPU, since[_place(w)], _place(w))):
        if _place(worker) not in left[stages[worker.id]]:
            left[stages[worker.id]].append(_place(worker))
    if min((len(left[stage]) for stage in set(stages.values())), default=0) < 2:
        return unable
    # The first place of all is the first of each of its stages, so it always changes.
    waiting = {place for places in left.values() for place in places[len(places) // 2 :]}
    return {**unable, **{name: one.folder for name, one in before.items() if _place(one) in waiting}}


def _place(worker: WorkerInfo) -> str:
    """Returns a name of what a worker changes together with: the process of its GPU; itself, if it is on a CPU."""
    return f"{worker.node} {worker.pid}" if worker.device == GPU else worker.id
