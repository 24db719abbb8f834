"""What the model consists of: immutable values only.

Names follow the keys and messages of the system. Requests are numbers 0, 1, ...; a run is a number in place of a random
nonce, 0 for none; a worker id is `slot * LIVES + life`, where a life is a number in place of a random nonce. Numbers of
runs and lives are compared for equality only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

LIVES = 64
#: Ids of mixes begin here.
MIX = 64
Job = Literal["", "queue", "reruns", "pinned", "delayed"]


class Record(NamedTuple):
    """`request:<id>` and `log:<id>`: truth. `ends` are the terminal entries of the log: one at most."""

    state: Literal["queued", "running", "done"] = "queued"
    run: int = 0
    route: tuple[int, ...] = ()
    log: tuple[int, ...] = ()
    ends: tuple[str, ...] = ()
    abandoned: bool = False
    job: Job = "queue"
    pages_needed: int = 0
    pages_reserved: int = 0
    deaths: int = 0
    quarantine_deaths: int = 0
    attempts: int = 0
    deaths_at: int = 0  # log length at which deaths and tries were counted
    trials: tuple[int, ...] = ()  # (no part of the system) log lengths at which it died alone
    tenant: int = 0
    body: tuple[int, ...] = ()  # of a tensor step: the tokens of the session with it
    numerics: tuple[tuple[int, int], ...] = ()  # numerics ids, each with the length of the log before its first token
    forsaken: bool = False  # (no part of the system) another id took it, or its end, while its own was served

    @property
    def own_id(self) -> int:
        """The numerics id of whoever computed the last tokens."""
        return self.numerics[-1][0] if self.numerics else 0

    def id_of(self, position: int) -> int:
        """The numerics id of whoever computed the token at a position."""
        return [name for name, start in self.numerics if start <= position][-1]


class NextJob(NamedTuple):
    """Last stage or COMMIT -> inbox of the first worker."""

    request: int
    run: int
    position: int
    tokens: tuple[int, ...]


class Segment(NamedTuple):
    """Stage -> next stage: rows [first, end) of a request; `samples`: the last known token is among them."""

    request: int
    run: int
    sequence: int
    first: int
    end: int
    samples: bool


class Commit(NamedTuple):
    request: int
    run: int
    position: int
    tokens: tuple[int, ...]
    end: str


class WorkerRecord(NamedTuple):
    """`worker:<id>`, its inbox on the control Redis (None: gone), `worker-requests:<id>` and `quarantine:<id>`."""

    pages: int
    reserved: int = 0
    inbox: tuple[NextJob, ...] | None = ()
    on: tuple[int, ...] = ()
    quarantine: int | None = None


class Session(NamedTuple):
    """`session:<id>`. `tokens` are those of all steps; a step's own token is its number."""

    step: int = 0
    request: int = -1
    tokens: tuple[int, ...] = ()


class Redis(NamedTuple):
    """The control Redis.

    `queue` holds first runs as (rank, request), lowest first; `shares` each tenant's next rank, `virtual` the rank
    claimed last. `running` is the set of all unfinished requests, as in the system.
    """

    requests: tuple[Record | None, ...]
    workers: tuple[tuple[int, WorkerRecord], ...] = ()
    queue: tuple[tuple[int, int], ...] = ()
    shares: tuple[tuple[int, int], ...] = ()
    virtual: int = 0
    reruns: tuple[int, ...] = ()
    pinned: tuple[int, ...] = ()  # re-runs that wait for a worker of their numerics id
    delayed: tuple[int, ...] = ()
    running: tuple[int, ...] = ()
    letters: tuple[int, ...] = ()
    session: Session | None = None

    def worker(self, worker: int) -> WorkerRecord | None:
        for known, record in self.workers:
            if known == worker:
                return record
        return None

    def with_worker(self, worker: int, record: WorkerRecord | None) -> "Redis":
        others = [w for w in self.workers if w[0] != worker]
        if record is not None:
            others.append((worker, record))
            others.sort()
        return self._replace(workers=tuple(others))

    def with_request(self, request: int, record: Record | None) -> "Redis":
        changed = list(self.requests)
        changed[request] = record
        return self._replace(requests=tuple(changed))


class Run(NamedTuple):
    """A run in a worker's table. Units: the prompt has `Bounds.prompt` of them, every token is one.

    `known` units are known, `computed` of them have KV here; `sequence` counts messages sent (first stage) or is the
    next one expected (later stage); `committed` tokens were handed to COMMIT; `ended`: only the last COMMIT is missing.
    """

    request: int
    run: int
    route: tuple[int, ...]
    known: int
    computed: int = 0
    sequence: int = 0
    committed: int = 0
    quarantined: bool = False
    ended: bool = False


class Process(NamedTuple):
    """One worker slot; one that is "gone" never starts again. `fresh`: it takes the Redis that runs now for the one it
    knows; `noted`: it knows one.

    `quarantine`: the request that it computes alone now, -1 for none. `written` (only without the rule that CLAIM is
    atomic): a job that it has deleted and whose route it has not written yet, -1 for none.
    """

    id: int
    up: Literal["up", "paused", "dead", "gone"] = "up"
    ready: bool = True
    fresh: bool = True
    noted: bool = True
    table: tuple[Run, ...] = ()
    pending: tuple[Commit, ...] = ()
    quarantine: int = -1
    written: int = -1


class Budget(NamedTuple):
    """How often each fault may still happen."""

    kill: int = 0
    retire: int = 0  # a worker ends for good, as in an upgrade
    pause: int = 0
    restart: int = 0
    failover: int = 0  # a replica goes on as the master, without what it does not have
    wipe: int = 0  # the payload Redis loses all
    duplicate: int = 0
    lost_reply: int = 0
    early_dead: int = 0  # a worker that lives and works is declared dead
    stalled: int = 0  # a run that makes progress is re-run
    forget: int = 0  # a request that has ended is forgotten before its time
    cancel: int = 0
    deadline: int = 0
    gateway_kill: int = 0
    leave: int = 0  # a client goes away for longer than the grace period


class Flight(NamedTuple):
    """A gateway's knowledge of a request: log entries `heard`, how it `ended`, and the outputs of a tensor `step`.

    `ended` is "gone" when it cannot be followed any more, and "refused" when its client was told that it is not
    accepted: the gateway will take it back. `by` (no part of the system): numerics ids of those who computed `heard`.
    """

    request: int
    step: int = 0
    heard: tuple[int, ...] = ()
    by: tuple[int, ...] = ()
    ended: str = ""
    result: tuple[int, ...] = ()


class Client(NamedTuple):
    """What it has `seen`, on which gateway it reads (-1: none), and of a session the `step` that it wants answered.

    `posted`: it was told that its request is accepted. `by`: as of a flight.
    """

    request: int = 0
    step: int = 1
    seen: tuple[int, ...] = ()
    by: tuple[int, ...] = ()
    ended: str = ""
    gateway: int = -1
    posted: bool = False


class State(NamedTuple):
    """`saved`: what Redis will find on its disk after the next crash, or the replica has that becomes the master; None:
    everything. `rows`: the payload inboxes.

    No part of the system: `passed`, per tenant, first runs of others claimed since one of its own waits; `cancelled`,
    requests whose cancellation was answered.
    """

    redis: Redis
    processes: tuple[Process, ...]
    budget: Budget
    saved: Redis | None = None
    rows: tuple[tuple[int, tuple[Segment | NextJob, ...]], ...] = ()
    overdue: tuple[tuple[int, int], ...] = ()  # requests past their deadline, and how long their log was then
    nonce: int = 1
    flights: tuple[tuple[Flight, ...], ...] = ()
    clients: tuple[Client, ...] = ()
    passed: tuple[int, ...] = ()
    cancelled: tuple[int, ...] = ()

    def payload(self, worker: int) -> tuple[Segment | NextJob, ...] | None:
        for known, messages in self.rows:
            if known == worker:
                return messages
        return None

    def with_payload(self, worker: int, messages: tuple[Segment | NextJob, ...] | None) -> "State":
        others = [r for r in self.rows if r[0] != worker]
        if messages is not None:
            others.append((worker, messages))
            others.sort(key=lambda r: r[0])
        return self._replace(rows=tuple(others))

    def with_process(self, slot: int, process: Process) -> "State":
        changed = list(self.processes)
        changed[slot] = process
        return self._replace(processes=tuple(changed))


def name_of(ids: Sequence[int]) -> int:
    """The numerics id of a route whose stages have these."""
    each = tuple(dict.fromkeys(ids))
    return each[0] if len(each) == 1 else sum(MIX ** (index + 1) * (one + 1) for index, one in enumerate(each))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Everything True is the protocol. A test switches each off and demands that the model notices."""

    # starred in the design
    claim_is_atomic: bool = True
    commit_checks_run: bool = True
    foreign_runs_are_dropped: bool = True
    dead_reruns_all: bool = True
    gone_worker_forgets: bool = True
    restart_forgets_and_reruns: bool = True
    # others that carry weight
    accept_is_idempotent: bool = True
    abandoned_begin_anew: bool = True
    steps_are_compared: bool = True
    queue_is_fair: bool = True
    claim_reserves: bool = True
    claim_skips_what_fits_nowhere: bool = True
    commit_compares_positions: bool = True
    commit_sees_gaps: bool = True
    deadlines_are_kept: bool = True
    terminal_absorbs: bool = True
    rerun_checks_run: bool = True
    only_the_ended_are_forgotten: bool = True
    release_gives_back: bool = True
    end_unqueues: bool = True
    delayed_are_promoted: bool = True
    beat_finds_orphans: bool = True
    identity_is_noted_first: bool = True
    sequence_is_checked: bool = True
    youngest_is_preempted: bool = True
    deaths_need_unchanged_length: bool = True
    suspects_run_alone: bool = True
    only_the_tried_is_blamed: bool = True
    grace_asks_for_other_readers: bool = True
    gateway_accepts_again: bool = True
    gateway_waits_behind: bool = True
    gateway_sees_an_early_end: bool = True
    key_makes_id: bool = True
    pinned_wait: bool = True
    pure_routes: bool = True
    pinned_go_on: bool = True
    freed_ask_again: bool = True
    routes_are_whole: bool = True
    small_pools_serve_nobody: bool = True
    accept_waits: bool = True
    accept_writes_again: bool = True
    cancel_waits: bool = True
    cancel_writes_again: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The size of one configuration."""

    stages: int = 2
    workers: int = 2  # per stage
    requests: int = 1
    tokens: int = 2  # every answer has so many
    prompt: int = 2  # units of a prompt; read in two pieces where there are two stages
    pages: int = 100  # of a worker, one unit each
    pools: tuple[int, ...] = ()  # pages of each slot, ascending within a stage and numerics id; else all have `pages`
    room: int = 1  # runs that a worker takes
    needs: tuple[int, ...] = ()  # pages that each request may need; else prompt + tokens
    tenants: tuple[int, ...] = ()  # whose each request is; else all of one
    ids: tuple[int, ...] = ()  # numerics id of each slot, ascending within a stage; else all have one
    varying: frozenset[int] = frozenset()  # of these, ids of devices that do not compute the same bits twice
    exact: frozenset[int] = (
        frozenset()
    )  # requests that end rather than go on under another id, or under one that varies
    announce: bool = False  # the last stage tells the first its tokens before COMMIT does
    delays: bool = False  # from the second re-run at one length on, a request waits
    poison: frozenset[int] = frozenset()  # requests that kill the worker that computes them
    quarantine_after: int = 0  # deaths after which a request is tried alone; 0: deaths are not counted
    max_quarantine_deaths: int = 0
    gateways: int = 0  # with clients that send the requests; else all are in the queue at the beginning
    clients: int = 0
    steps: int = 0  # of the session, when it is one
    clients_return: bool = True  # when they are cut off
    background: bool = False  # clients want to know that their request is accepted, and no more
    replicas: bool = False  # whoever is told something waits until the replicas have it (BLOCKRELAY_ACCEPT_REPLICAS)
    ends_when_done: bool = True  # nothing is looked at behind the last end
    either_worker: bool = True  # CLAIM's choice among equally loaded workers is open; else it is the first
    faults: Budget = field(default_factory=Budget)
    rules: Rules = field(default_factory=Rules)

    @property
    def slots(self) -> int:
        return self.stages * self.workers

    @property
    def sessions(self) -> bool:
        return self.steps > 0

    def stage(self, worker: int) -> int:
        return worker // LIVES // self.workers

    def pool(self, worker: int) -> int:
        return self.pools[worker // LIVES] if self.pools else self.pages

    def numerics(self, worker: int) -> int:
        return self.ids[worker // LIVES] if self.ids else 0

    def route_numerics(self, route: Sequence[int]) -> int:
        """The numerics id of a route: of its workers, or of their mix."""
        return name_of([self.numerics(worker) for worker in route])

    def varies(self, numerics: int) -> bool:
        return numerics >= MIX or numerics in self.varying

    def pinned(self, record: Record) -> bool:
        """Whether its tokens decide the numerics id under which it goes on."""
        return bool(record.log) and not (record.numerics and self.varies(record.own_id))

    def pages_needed(self, request: int) -> int:
        return self.needs[request] if self.needs else self.prompt + self.tokens

    def tenant(self, request: int) -> int:
        return self.tenants[request] if self.tenants else 0
