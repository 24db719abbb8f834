"""What the model consists of: immutable values only.

Names follow the keys and messages of the system. Requests are numbers 0, 1, ...; a run is a number in place of a random
nonce, 0 for none; a worker id is `slot * LIVES + life`, where a life is a number in place of a random nonce. Numbers of
runs and lives are compared for equality only.
"""

from typing import Literal, NamedTuple

LIVES = 64
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
    # Of requests that GPUs may compute (`Bounds.handover`); for a block stands its stage.
    for_gpu: bool = False  # its class
    failed: tuple[int, ...] = ()  # fallback events
    denied: tuple[int, ...] = ()  # waits for GPUs of these, since it denies fallbacks
    private: bool = False
    reusable: int = -1
    missing_pages: int = 0
    flagged: tuple[int, ...] = ()  # positions of the log that say `varies`
    places: tuple[int, ...] = ()  # (no part of the system) whose GPUs ran it when one of them failed, and no GPU since
    late: bool = False  # (no part of the system) it began under a numerics id all of whose workers retired

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
    """Stage -> next stage: rows [first, end) of a request; `samples`: the last known token is among them.

    `tokens`: those of the request up to `end`. `varied` (no part of the system): a device that varies has made them.
    """

    request: int
    run: int
    sequence: int
    first: int
    end: int
    samples: bool
    tokens: tuple[int, ...] = ()
    varied: bool = False


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
    retires: bool = False  # it takes only requests that have tokens of its numerics id


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


class Page(NamedTuple):
    """A page of one unit that has left its worker. Its name: `root` (a request, or below 0 what many have in common),
    the stage, and units and tokens up to its end.

    No part of the system: whose it is, the tokens `under` it when it was computed, and `varied` as of a segment.
    """

    root: int
    stage: int
    units: int
    tokens: tuple[int, ...]
    request: int
    under: tuple[int, ...]
    varied: bool


class Run(NamedTuple):
    """A run in a worker's table. Units: the prompt has `Bounds.prompt` of them, every token is one.

    `known` units are known, `computed` of them have KV here; `sequence` counts messages sent (first stage) or is the
    next one expected (later stage); `committed` tokens were handed to COMMIT; `ended`: only the last COMMIT is missing.
    """

    request_id: int
    run: int
    route: tuple[int, ...]
    known: int
    computed: int = 0
    sequence: int = 0
    committed: int = 0
    quarantined: bool = False
    ended: bool = False
    # With `Bounds.handover`: the tokens that are known; whether its pages are private; `varied`: as of a segment;
    # `wrong` (no part of the system): the tokens of a page, or another request, that it computes on.
    tokens: tuple[int, ...] = ()
    private: bool = False
    varied: bool = False
    wrong: str = ""


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
    leaving: bool = False  # another plan serves: it takes no more requests, and passes those on that it has
    told: bool = False  # the plan gives it another block folder: another numerics id
    going: bool = False  # it has found that it may go, and will leave at its next event


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
    device: int = 0  # a GPU fails under all its stages, and starts again
    drain: int = 0  # a worker ends as it was told to, or renews its device, and begins anew
    move: int = 0  # a worker of the first stage learns that the workers of another plan serve
    change: int = 0  # a worker of numerics id 0 is given another block folder
    call_off: int = 0  # a worker that was given another block folder is to keep its own


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
    read: tuple[int, ...] = ()  # a token and who computed it, while replicas are asked for it


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

    `stored`: the pages that other workers find.

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
    stored: tuple[Page, ...] = ()
    deciding: tuple[int, ...] = ()  # whom a scheduler has seen wait for a GPU for too long

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
