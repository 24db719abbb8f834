"""Who could run a request: routes of live workers, and the numerics ids that they serve (`serving.lua`)."""

from collections.abc import Sequence

from tests.protocol_model.data import Bounds, Redis


def served(b: Bounds, redis: Redis, numerics: int, pages_needed: int, beating: Sequence[int]) -> bool:
    """Whether every stage has a live worker of the numerics id whose pool, even empty, would hold the request."""
    staffed = {
        b.stage(worker)
        for worker, w in redis.workers
        if w.inbox is not None
        and worker in beating
        and b.numerics(worker) == numerics
        and (w.pages >= pages_needed or not b.rules.small_pools_serve_nobody)
    }
    return 0 in staffed and (len(staffed) == b.stages or not b.rules.routes_are_whole)


def find_route(b: Bounds, redis: Redis, me: int, reserve: int, beating: Sequence[int], latest: bool) -> tuple[int, ...]:
    """A worker for every stage, me at the front; empty when some stage has no live worker with room."""
    route: list[int] = []
    for stage in range(b.stages):
        best: tuple[int, int] | None = None
        for worker, w in redis.workers:
            if b.stage(worker) != stage or w.inbox is None or w.pages - w.reserved < reserve or worker not in beating:
                continue
            if (stage == 0 and worker != me) or b.numerics(worker) != b.numerics(me):
                continue
            if best is None or len(w.on) < best[0] or (latest and len(w.on) == best[0]):
                best = (len(w.on), worker)
        if best is None:
            return ()
        route.append(best[1])
    return tuple(route)


def fits_nowhere(b: Bounds, redis: Redis, pages_needed: int, beating: Sequence[int]) -> bool:
    """Whether some stage has no live worker whose pool, even empty, would hold the request."""
    return any(
        all(w.pages < pages_needed for worker, w in redis.workers if b.stage(worker) == stage and worker in beating)
        for stage in range(b.stages)
    )
