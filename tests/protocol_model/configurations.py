"""What is checked. Each configuration is as small as its subject allows; together they have everything."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.protocol_model.bounds import Bounds
from tests.protocol_model.data import Budget


@dataclass(frozen=True, slots=True)
class Configuration:
    """`quick` is in the default test suite (seconds), `full` in `make model`. Both lists are explored one by one."""

    name: str
    about: str
    quick: tuple[Bounds, ...]
    full: tuple[Bounds, ...]


def _one_each(base: Bounds, *faults: Budget) -> tuple[Bounds, ...]:
    return tuple(replace(base, faults=f) for f in faults)


_PIPELINE = Bounds()
_NARROW = Bounds(workers=1)
_KEYED = Bounds(stages=1, workers=1, clients=1, gateways=2)
_SESSION = Bounds(stages=1, workers=1, clients=1, gateways=1, steps=2, requests=4, prompt=1, tokens=0)
_CONFIRMED = replace(_KEYED, replicas=True)
_ACCEPTED = replace(_CONFIRMED, gateways=1, clients_return=False, background=True)
_POISON = Bounds(
    stages=1,
    workers=1,
    requests=2,
    room=2,
    prompt=1,
    quarantine_after=1,
    max_quarantine_deaths=2,
    poison=frozenset({0}),
)
_UPGRADE = Bounds(stages=1, workers=2, ids=(0, 1), prompt=1)
_UPGRADED_PIPELINE = Bounds(ids=(0, 1, 0, 1))
#: A GPU and a CPU for each stage.
_MIXED = Bounds(ids=(0, 1, 0, 1), varying=frozenset({1}))
#: One that fails hands the run and its pages over, and has either of two first tokens.
_HANDED_OVER = Bounds(stages=1, ids=(0, 1), varying=frozenset({1}), gpus=frozenset({1}), handover=True)
_TWO_STAGES_HANDED_OVER = replace(_HANDED_OVER, stages=2, ids=(0, 1, 0, 1), prompt=1)
_GPU_ALONE = replace(_HANDED_OVER, workers=1, ids=(1,), prompt=1)
_DENIED = replace(_HANDED_OVER, deny=frozenset({0}))
_LIMITED = replace(_HANDED_OVER, limited=frozenset({0}))
_TWO_STAGES_LIMITED = replace(_TWO_STAGES_HANDED_OVER, limited=frozenset({0}), tokens=1)
_SPILLS = replace(_HANDED_OVER, spills=True)
_TWO_STAGES_DENIED = replace(_TWO_STAGES_HANDED_OVER, deny=frozenset({0}))
_SHOWN = replace(_GPU_ALONE, clients=1, gateways=1, replicas=True, pages_leave=False)
_SHOWN_AND_HANDED_OVER = replace(_SHOWN, workers=2, ids=(0, 1), tokens=3, choices=frozenset({2}), lost_from=1)
#: Two workers of each stage, with other borders between the stages of one than of the other.
_TWO_PLANS = Bounds(plans=(0, 1, 0, 1), prompt=1)
#: A worker of the old precision and one of the new one for each stage.
_TWO_PRECISIONS = Bounds(stages=1, ids=(0, 1), prompt=1)
_ONE_AFTER_THE_OTHER = replace(_TWO_PRECISIONS, alone=True)
_PRECISIONS_OF_STAGES = replace(_TWO_PRECISIONS, stages=2, ids=(0, 1, 0, 1))
_MORE_OF_THE_OLD = replace(_TWO_PRECISIONS, workers=3, ids=(0, 0, 1))
#: Those of the old precision are GPUs, whose requests any worker could take over.
_OLD_GPUS = replace(_MORE_OF_THE_OLD, varying=frozenset({0}))
_SMALL_POOL = replace(_UPGRADE, workers=3, ids=(0, 0, 1), pools=(2, 3, 3))

CONFIGURATIONS = (
    Configuration(
        "pipeline",
        "one request, 2 stages x 2 workers: kills, zombies, lost tails, duplicates, lost replies",
        _one_each(_NARROW, Budget(restart=1), Budget(early_dead=1), Budget(stalled=1), Budget(wipe=1))
        + _one_each(_PIPELINE, Budget(kill=1), Budget(pause=1), Budget(duplicate=1), Budget(lost_reply=1))
        + _one_each(replace(_NARROW, announce=True), Budget(kill=1)),
        _one_each(_PIPELINE, Budget(kill=1, pause=1), Budget(kill=2), Budget(wipe=1))
        + _one_each(
            _NARROW,
            Budget(restart=1, kill=1),
            Budget(restart=1, duplicate=1, lost_reply=1),
            Budget(kill=1, pause=1, duplicate=1, lost_reply=1),
        )
        + _one_each(replace(_NARROW, announce=True), Budget(restart=1))
        + _one_each(replace(_NARROW, requests=2, room=2), Budget(kill=1), Budget(pause=1)),
    ),
    Configuration(
        "reservation",
        "requests whose prompts, or whose tokens, do not fit beside each other on two stages; one that fits nowhere",
        (
            Bounds(workers=1, requests=2, room=2, pages=4),
            Bounds(workers=1, requests=2, room=2, tokens=1, pages=4, needs=(9, 3)),
            Bounds(workers=1, requests=2, room=2, prompt=1, tokens=4, pages=5),
        ),
        (
            Bounds(workers=1, requests=3, room=3, pages=8),
            Bounds(workers=1, requests=3, room=3, prompt=1, tokens=3, pages=8),
            Bounds(workers=1, requests=2, room=2, prompt=1, tokens=3, pages=5, faults=Budget(kill=1)),
            Bounds(workers=1, requests=2, room=2, pages=4, faults=Budget(kill=1)),
        ),
    ),
    Configuration(
        "preemption",
        "one stage that promises more pages than it has",
        (
            Bounds(stages=1, workers=1, requests=2, room=2, prompt=1, tokens=3, pages=4),
            Bounds(stages=1, workers=1, requests=2, room=2, prompt=1, tokens=2, pages=4, needs=(9, 3)),
        ),
        (Bounds(stages=1, workers=1, requests=3, room=3, prompt=1, tokens=3, pages=5, faults=Budget(kill=1)),),
    ),
    Configuration(
        "cancellation",
        "cancel and deadline race commits, re-runs and deaths; nothing follows the end",
        _one_each(replace(_NARROW, stages=1, workers=2, ends_when_done=False), Budget(cancel=1, deadline=1, pause=1)),
        _one_each(
            replace(_NARROW, stages=1, workers=2, ends_when_done=False),
            Budget(cancel=1, deadline=1, pause=1, kill=1, lost_reply=1),
        )
        + _one_each(replace(_NARROW, ends_when_done=False), Budget(cancel=1, deadline=1, kill=1)),
    ),
    Configuration(
        "clients",
        "one key, two gateways: gateways die, clients come and go, Redis loses accepts and tokens, deadlines pass",
        _one_each(_KEYED, Budget(gateway_kill=1, lost_reply=1), Budget(restart=1), Budget(restart=1, deadline=1))
        + _one_each(replace(_KEYED, clients_return=False), Budget(restart=1))
        + _one_each(_KEYED, Budget(leave=1, gateway_kill=1), Budget(forget=1, gateway_kill=1))
        + _one_each(replace(_KEYED, clients=2, requests=2), Budget(gateway_kill=1)),
        _one_each(
            _KEYED,
            Budget(restart=1, gateway_kill=1, deadline=1, lost_reply=1),
            Budget(leave=2, gateway_kill=1, pause=1),
        ),
    ),
    Configuration(
        "sessions",
        "tensor steps, repeated and lost",
        _one_each(_SESSION, Budget(gateway_kill=1, lost_reply=1), Budget(restart=1), Budget(forget=1, lost_reply=1)),
        _one_each(replace(_SESSION, steps=3, requests=5), Budget(restart=1, gateway_kill=1)),
    ),
    Configuration(
        "failovers",
        "a replica goes on without a tail, and what clients were told when the replicas had it",
        _one_each(_ACCEPTED, Budget(failover=1, gateway_kill=1), Budget(failover=1, cancel=2))
        + _one_each(_CONFIRMED, Budget(failover=1, lost_reply=1))
        + _one_each(replace(_SESSION, replicas=True), Budget(failover=1, lost_reply=1, gateway_kill=1))
        + _one_each(_NARROW, Budget(failover=1)),
        _one_each(_ACCEPTED, Budget(failover=2, gateway_kill=1, kill=1))
        + _one_each(_CONFIRMED, Budget(failover=2, gateway_kill=1), Budget(failover=1, cancel=2, gateway_kill=1))
        + _one_each(replace(_CONFIRMED, clients=2), Budget(failover=1, gateway_kill=1))
        + _one_each(replace(_SESSION, requests=5, replicas=True), Budget(failover=2, lost_reply=1))
        + _one_each(_NARROW, Budget(failover=1, kill=1)),
    ),
    Configuration(
        "poison",
        "a request that kills its worker, beside one that does not, and a worker killed by chance",
        _one_each(_POISON, Budget(kill=1))
        + _one_each(replace(_POISON, poison=frozenset({1})), Budget())
        + _one_each(replace(_POISON, poison=frozenset(), requests=1, tokens=3), Budget(kill=3)),
        _one_each(replace(_POISON, workers=2, delays=True), Budget(kill=1))
        + _one_each(replace(_POISON, max_quarantine_deaths=3, tokens=1), Budget(kill=2)),
    ),
    Configuration(
        "upgrade",
        "workers of two numerics ids, of which the old ones leave for good",
        _one_each(_UPGRADE, Budget(retire=1), Budget(kill=1))
        + _one_each(replace(_UPGRADE, workers=3, ids=(0, 0, 1)), Budget(retire=2))
        + _one_each(replace(_UPGRADE, exact=frozenset({0})), Budget(retire=1))
        + _one_each(_UPGRADED_PIPELINE, Budget(retire=1))
        + _one_each(_SMALL_POOL, Budget(retire=1)),
        _one_each(
            _UPGRADE,
            Budget(retire=1, kill=1, pause=1),
            Budget(retire=1, restart=1),
            Budget(retire=1, deadline=1, cancel=1),
        )
        + _one_each(replace(_UPGRADE, requests=2, room=2), Budget(retire=1, kill=1))
        + _one_each(_UPGRADED_PIPELINE, Budget(retire=1, kill=1))
        + _one_each(_SMALL_POOL, Budget(retire=1, kill=1, pause=1)),
    ),
    Configuration(
        "plans",
        "two plans in force: requests leave the workers of one for those of the other, any of which may die",
        _one_each(_TWO_PLANS, Budget(move=1), Budget(move=1, kill=1)),
        _one_each(_TWO_PLANS, Budget(move=1, pause=1), Budget(move=1, lost_reply=1, stalled=1))
        + _one_each(replace(_TWO_PLANS, requests=2, room=2, tokens=1), Budget(move=1)),
    ),
    Configuration(
        "precisions",
        "workers retire, because the plan gives them another block folder, or stay after all; any may die",
        _one_each(_TWO_PRECISIONS, Budget(change=1, call_off=1))
        + _one_each(replace(_TWO_PRECISIONS, requests=2), Budget(change=1, stalled=1))
        + _one_each(_ONE_AFTER_THE_OTHER, Budget(change=1, kill=1), Budget(change=1, call_off=1, restart=1))
        + _one_each(replace(_ONE_AFTER_THE_OTHER, exact=frozenset({0})), Budget(change=1, kill=1))
        + _one_each(replace(_MORE_OF_THE_OLD, pools=(2, 3, 3)), Budget(change=2, call_off=1))
        + _one_each(_OLD_GPUS, Budget(change=2, call_off=1))
        + _one_each(_PRECISIONS_OF_STAGES, Budget(change=2, stalled=1))
        + _one_each(replace(_PRECISIONS_OF_STAGES, alone=True), Budget(change=1, kill=1)),
        _one_each(_PRECISIONS_OF_STAGES, Budget(change=2, kill=1), Budget(change=2, call_off=1, lost_reply=1))
        + _one_each(_TWO_PRECISIONS, Budget(change=1, call_off=1, restart=1), Budget(change=1, pause=1, early_dead=1))
        + _one_each(replace(_PRECISIONS_OF_STAGES, requests=2, tokens=1), Budget(change=2, stalled=1))
        + _one_each(replace(_PRECISIONS_OF_STAGES, workers=3, ids=(0, 0, 1, 0, 0, 1)), Budget(change=4)),
    ),
    Configuration(
        "mixed",
        "GPUs that do not compute the same bits twice and CPUs in one route, one of which dies or leaves",
        _one_each(_MIXED, Budget(kill=1), Budget(retire=1))
        + _one_each(replace(_MIXED, exact=frozenset({0})), Budget(kill=1)),
        _one_each(_MIXED, Budget(kill=1, retire=1), Budget(kill=2))
        + _one_each(replace(_MIXED, exact=frozenset({0})), Budget(kill=2)),
    ),
    Configuration(
        "hand-over",
        "a GPU that fails, drains or dies: its stand-in goes on from its pages, whatever Redis has lost",
        _one_each(_HANDED_OVER, Budget(device=1), Budget(drain=1, kill=1))
        + _one_each(replace(_HANDED_OVER, requests=2, room=2, tokens=1), Budget(device=1))
        + _one_each(replace(_HANDED_OVER, exact=frozenset({0})), Budget(drain=1))
        + _one_each(replace(_GPU_ALONE, tokens=3, lost_from=1), Budget(restart=1, drain=1))
        + _one_each(_TWO_STAGES_HANDED_OVER, Budget(device=1)),
        _one_each(replace(_HANDED_OVER, lost_from=1), Budget(restart=1, device=1), Budget(device=1, wipe=1))
        + _one_each(replace(_TWO_STAGES_HANDED_OVER, prompt=2), Budget(kill=1)),
    ),
    Configuration(
        "denial",
        "no CPU takes the place of a GPU that failed: it waits for another one, and ends when none comes; or at once, "
        "where CPUs are too slow",
        _one_each(_DENIED, Budget(device=1), Budget(retire=1), Budget(drain=1))
        + _one_each(_LIMITED, Budget(device=1), Budget(kill=1, drain=1))
        + _one_each(_TWO_STAGES_LIMITED, Budget(device=1))
        + _one_each(replace(_TWO_STAGES_DENIED, tokens=1), Budget(device=1)),
        _one_each(_TWO_STAGES_DENIED, Budget(device=1), Budget(retire=1)),
    ),
    Configuration(
        "spill",
        "a request for a GPU begins on a CPU, at any moment and from any place in the queue, unless its client says no",
        _one_each(replace(_SPILLS, requests=2, room=2, tokens=1), Budget(device=1), Budget(kill=1))
        + _one_each(replace(_SPILLS, requests=2, tokens=1, deny=frozenset({0})), Budget(device=1), Budget(drain=1))
        + _one_each(replace(_TWO_STAGES_HANDED_OVER, spills=True, tokens=1), Budget(device=1)),
        _one_each(replace(_TWO_STAGES_HANDED_OVER, spills=True, tokens=1), Budget(kill=1)),
    ),
    Configuration(
        "shown",
        "tokens of a GPU that a client has seen, and a failover that takes back what it can",
        _one_each(_SHOWN, Budget(failover=1)),
        _one_each(_SHOWN_AND_HANDED_OVER, Budget(failover=1, device=1))
        + _one_each(_SHOWN, Budget(failover=1, device=1)),
    ),
    Configuration(
        "queue",
        "fair shares between tenants, re-runs that wait",
        (
            Bounds(stages=1, workers=1, requests=4, tokens=1, prompt=1, tenants=(0, 0, 0, 1)),
            Bounds(stages=1, workers=1, requests=2, room=2, prompt=1, delays=True, faults=Budget(kill=2)),
        ),
        (
            Bounds(
                stages=1,
                workers=2,
                requests=4,
                tokens=1,
                prompt=1,
                tenants=(0, 0, 1, 1),
                faults=Budget(kill=1, cancel=1),
            ),
            Bounds(workers=1, requests=2, room=2, tokens=1, delays=True, faults=Budget(kill=1, lost_reply=1)),
        ),
    ),
)


def parts(full: bool) -> Iterator[tuple[Configuration, Bounds]]:
    for configuration in CONFIGURATIONS:
        for bounds in configuration.quick + (configuration.full if full else ()):
            yield configuration, bounds
