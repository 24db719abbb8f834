"""Decides which block folder each worker serves while a cell changes from one precision to another. Pure.

Some workers of each stage change first, so that the others still form routes of the old precision and take the requests
over that those had begun. Where a stage has one worker left, all change together: each goes on with the requests that
it has begun, and leaves when these have ended.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from blockrelay.protocol.plan import Plan, WorkerInfo


def other_folders(
    workers: Sequence[WorkerInfo], stages: Mapping[str, int], *, folder: str, current: Plan | None
) -> dict[str, str]:
    """Returns the keys of block folders, by worker id, of those workers that are not to serve `folder` yet.

    `stages` has the stage index of each worker, and `folder` is the key of a folder, or "" for that with which workers
    started. `current` is the plan in force. Half of the workers that a stage has left change at once, and the next ones
    when these serve. A worker that does not have the folder keeps its own.
    """
    unable = {w.id: w.folder for w in workers if w.folders and w.folder_with(folder) is None}
    placed = [w for w in workers if w.id in stages and w.id not in unable]
    before = {w.id: w for w in placed if w.stage is not None and w.folder not in ("", folder or w.model)}
    has_begun = current is not None and current.folder == folder
    kept = {name: one.folder for name, one in before.items() if current and name in current.other_folders}
    if has_begun and len(kept) < len(before):
        return {**unable, **kept}
    if any(worker.state == "loading" for worker in placed):
        return {**unable, **(kept if has_begun else {name: one.folder for name, one in before.items()})}
    left: dict[int, list[str]] = defaultdict(list)
    for worker in sorted(before.values(), key=lambda w: (w.registered_ms, w.id)):
        left[stages[worker.id]].append(worker.id)
    if min((len(left[stage]) for stage in set(stages.values())), default=0) < 2:
        return unable
    return {**unable, **{name: before[name].folder for names in left.values() for name in names[len(names) // 2 :]}}
