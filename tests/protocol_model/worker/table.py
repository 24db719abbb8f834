"""What the steps of a worker share: its run table as a value, and who lives."""

from collections.abc import Iterator

from tests.protocol_model import scripts
from tests.protocol_model.bounds import Bounds
from tests.protocol_model.data import LIVES, Process, Run, State
from tests.protocol_model.explorer import Step

Steps = Iterator[Step[State]]


def beating(state: State) -> tuple[int, ...]:
    """Ids of the workers whose last beat is young: processes that run under that id now."""
    return tuple(p.id for p in state.processes if p.up == "up")


def spend(state: State, fault: str) -> State:
    """One fault fewer may happen."""
    return state._replace(budget=state.budget._replace(**{fault: getattr(state.budget, fault) - 1}))


def overdue(state: State) -> tuple[int, ...]:
    """Requests whose deadline has passed."""
    return tuple(request for request, _ in state.overdue)


def next_life(process: Process) -> int:
    """The id of a process's next life; canonical() renames lives, so there is always a free one."""
    assert process.id % LIVES + 1 < LIVES
    return process.id + 1


def dropped(table: tuple[Run, ...], request: int, run: int) -> tuple[Run, ...]:
    return tuple(r for r in table if (r.request_id, r.run) != (request, run))


def find(table: tuple[Run, ...], request: int, run: int) -> Run | None:
    return next((r for r in table if (r.request_id, r.run) == (request, run)), None)


def put(table: tuple[Run, ...], run: Run) -> tuple[Run, ...]:
    """In place of an older run of the request, else at the end: the table is ordered by age."""
    if any(r.request_id == run.request_id and r.run == run.run for r in table):
        return tuple(run if r.request_id == run.request_id else r for r in table)
    return (*(r for r in table if r.request_id != run.request_id), run)


def pages(table: tuple[Run, ...]) -> int:
    return sum(r.computed for r in table)


def rerun(
    b: Bounds, state: State, slot: int, request: int, run: int, reason: str, *, failed: int = -1, found: int = -1
) -> State:  # fmt: skip
    """RERUN, then forget the run here."""
    redis, _ = scripts.rerun(b, state.redis, request, run, reason, failed=failed, found=found)
    me = state.processes[slot]
    return state._replace(redis=redis).with_process(slot, me._replace(table=dropped(me.table, request, run)))
