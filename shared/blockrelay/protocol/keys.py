"""The table of all Redis keys. All keys of a cell share the hash tag `{cell}` and so one slot.

docs/redis-keys.md shows the table, and the Redis users of deploy/redis are made from it (`blockrelay.redis.users`).
Each script call declares the families that its script touches: Redis then refuses a caller without the rights to one
of them before the script has written anything.

`<model>` is the first 16 hex digits of the model hash; `<class>` is `gpu` (GPU workers allowed) or `cpu`.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

Server = Literal["control", "payload"]
#: The scripts that each service calls. The launcher and people use the rights of an administrator.
SCRIPTS_OF = {
    "gateway": ("ACCEPT", "FINISH", "FORGET", "MOVE"),
    "scheduler": ("DEAD", "FINISH", "MIGRATE", "PLAN", "RERUN", "UPGRADE"),
    "worker": ("BEAT", "CLAIM", "COMMIT", "DEAD", "FINISH", "RERUN"),
}
_ENDS = "COMMIT CLAIM RERUN FINISH DEAD"


@dataclass(frozen=True, slots=True)
class Family:
    """All keys of one kind: `{cell}:<name>`, or `{cell}:<name>:<of>` where a cell has several.

    `writers` and `readers` are separated by spaces: scripts (in capitals), and services that use the keys directly.
    """

    name: str
    of: str  # what tells the keys apart, `<id>` for example; "": a cell has one key
    content: str  # its type and content, for the documentation
    writers: str
    readers: str
    gone: str  # when a key is deleted, for the documentation
    server: Server = "control"

    @property
    def users(self) -> frozenset[str]:
        """Scripts and services that need a right to these keys."""
        return frozenset(f"{self.writers} {self.readers}".split())

    @property
    def row(self) -> str:
        """The family's line of the table in docs/redis-keys.md."""
        name = f"`{{cell}}:{self.name}{self.of and ':' + self.of}`"
        where = " (payload Redis)" if self.server == "payload" else ""
        lists = (", ".join(words.split()) for words in (self.writers, self.readers))
        return f"| {name} | {self.content}{where} | {' | '.join(lists)} | {self.gone} |"


FAMILIES = (
    Family("request", "<id>", "hash, the record; after the end with the log, if that is short", f"ACCEPT {_ENDS} MIGRATE FORGET", "BEAT MOVE gateway scheduler worker", "retention after the end, FORGET"),
    Family("log", "<id>", "stream, the token log; entry id = position", f"ACCEPT {_ENDS} FORGET", "gateway worker", "15 s after the end (a long one: as the record)"),
    Family("packing", "", "stream, a log while a script packs it", _ENDS, "", "at once"),
    Family("ended", "<kind>", "list of ended requests, oldest first; kinds: `first` and `last` to be forgotten", f"{_ENDS} FORGET", "scheduler", "member: FORGET, or behind its retention"),
    Family("running", "", "zset id -> ms of last progress; every request not finished", f"ACCEPT {_ENDS} BEAT scheduler", "gateway worker", "member: at the end"),
    Family("queue", "<model>:<class>", "zset of first runs, id -> rank", f"ACCEPT {_ENDS}", "scheduler", "member: CLAIM, FINISH"),
    Family("due", "<model>:<class>", "zset of first runs with a deadline, id -> ms by which it should be claimed", f"ACCEPT {_ENDS}", "", "member: CLAIM, FINISH"),
    Family("shares", "<model>:<class>", "zset of ranks: the virtual time of each priority, and the rank of each tenant's next first run", f"ACCEPT {_ENDS}", "", "when the queue was empty"),
    Family("jobs", "<model>:<class>", "stream that wakes workers; its one entry means nothing", "ACCEPT", "worker", "never"),
    Family("reruns", "<model>:<class>", "stream of request ids, re-runs for any worker (claimed first)", f"{_ENDS} BEAT MIGRATE", "scheduler worker", "entry: CLAIM, FINISH"),
    Family("pinned", "<model>:<class>:<numerics>", "stream of request ids, re-runs that have tokens, for workers of the numerics id that computed them", f"{_ENDS} BEAT MIGRATE", "worker", "entry: CLAIM, FINISH, MIGRATE"),
    Family("numerics", "<model>", "hash, class:numerics id that re-runs wait for -> ms without such a worker, ms of the last look, KV pages that its pools hold", "CLAIM COMMIT RERUN DEAD BEAT MIGRATE", "", "member: MIGRATE"),
    Family("delayed", "", "zset id -> ms from which its re-run may be queued", f"{_ENDS} BEAT", "", "member: CLAIM, BEAT, FINISH"),
    Family("outstanding", "<model>", "hash: tokens to compute (`rows`), tokens to generate and KV pages of all unfinished requests", f"ACCEPT {_ENDS}", "scheduler", "never"),
    Family("totals", "<model>", "hash: requests ever accepted, and ended by reason; workers that died; runs queued again by reason", f"ACCEPT {_ENDS}", "scheduler", "never"),
    Family("tenant-requests", "<tenant>", "set of the tenant's unfinished requests", f"ACCEPT {_ENDS}", "", "member: at the end"),
    Family("bucket", "<tenant>", "hash: tokens that the tenant's limit per minute leaves, when that was computed, and since when it exists", f"ACCEPT {_ENDS}", "", "120 s after the last use"),
    Family("workers", "", "zset worker -> ms of its last heartbeat", "BEAT DEAD worker", "ACCEPT CLAIM MIGRATE gateway scheduler", "member: DEAD"),
    Family("worker", "<id>", "hash: model, device, stage, pages, pages_reserved, pace; how far into each queue it has passed over requests that it cannot take", f"{_ENDS} BEAT worker", "ACCEPT MIGRATE gateway scheduler", "DEAD"),
    Family("worker-requests", "<worker>", "set of requests whose route has the worker", _ENDS, "BEAT gateway scheduler worker", "DEAD"),
    Family("quarantine", "<worker>", "string, the request that the worker runs alone", f"{_ENDS} worker", "", "after that run, DEAD"),
    Family("renewal", "<model>", "string, the GPU whose process is renewed", "worker", "", "when it serves again, after 660 s"),
    Family("inbox", "<worker>", "stream of next jobs and ends", f"{_ENDS} worker", "BEAT MIGRATE gateway scheduler", "DEAD"),
    Family("inbox", "<worker>", "stream of hidden states from the stage before, and of early next jobs", "worker", "scheduler", "DEAD", "payload"),
    Family("protocol", "", "string, number of the protocol that all services of the cell speak", "UPGRADE gateway scheduler worker", f"ACCEPT BEAT {_ENDS} FORGET MIGRATE MOVE PLAN", "never"),
    Family("settings", "", "hash: retention_s and dead_after_ms, which hold for all services of the cell", "scheduler", f"ACCEPT {_ENDS} MIGRATE FORGET gateway worker", "never"),
    Family("fleet", "<model>", "hash, cache of what ACCEPT and CLAIM computed from the registry", "ACCEPT CLAIM DEAD worker", "", "after 1 s, and when a worker comes or goes"),
    Family("exact-left", "<model>", "string, the deterministic worker that left last", "DEAD", "ACCEPT", "after 60 s"),
    Family("plan", "<model>", "hash: epoch, inputs, class, plan", "PLAN", "ACCEPT gateway scheduler worker", "never"),
    Family("plan-history", "<model>", "stream: plan, origin, author; schedulers put the newest into force", "scheduler", "", "trimmed to 100"),
    Family("measured-profile", "<model>", "string: how far measured times are from the profile, since when a better plan is known", "scheduler", "", "never"),
    Family("session", "<id>", "hash: step, fingerprint, request, tokens", "ACCEPT", "MOVE gateway", "retention after the last step"),
    Family("moved", "<name>", "string, version of the list of cells that gives a key or a session to another cell", "ACCEPT MOVE", "", "retention of requests with a key, and a day"),
    Family("result", "<id>", "string, tensor outputs", "worker", "gateway", "60 s after it was stored, 5 s after it was read", "payload"),
    Family("kv-asked", "<id>", "hash, page.layer -> KV that a tensor step asked for", "worker", "gateway", "60 s after it was stored, 5 s after it was read", "payload"),
    Family("kv-given", "<id>", "hash, page.layer -> KV that a client gave with a tensor step", "gateway", "worker", "600 s after it came, and when the step is answered", "payload"),
    Family("results", "", "zset id -> ms until which its result may be stored; +inf: the request has not ended", f"ACCEPT {_ENDS} gateway", "", "member: ACCEPT, behind its time"),
    Family("result-bytes", "", "hash id -> bytes and tenant of a member of `results`; also the sums for each tenant and for all", f"ACCEPT {_ENDS}", "", "member: with that of `results`"),
    Family("trace", "<id>", "stream of the stages' steps for a request that asked for a trace; the newest 4096", "worker", "gateway", "900 s after its last entry", "payload"),
    Family("page", "<name>", "hash, block -> KV page", "worker", "", "when unused for the page store's time, or evicted", "payload"),
    Family("pages", "<model>", "zset page -> ms of last use", "worker", "", "member: with its page", "payload"),
    Family("wake", "<gateway>", "stream, interrupts a gateway's blocking read", "gateway", "", "60 s after the last use"),
    Family("followers", "<id>", "hash of the gateways that read the log, once more than one has read it", "ACCEPT gateway", "FINISH FORGET", "retention"),
    Family("gateway", "<id>", "string, protocol number that the gateway speaks; there while it lives", "gateway", "FINISH", "15 s after its last heartbeat"),
    Family("lost-devices", "", "hash, device and worker -> JSON: a GPU that the worker has lost and waits for", "worker", "scheduler", "member: when it is tried again"),
    Family("device-retry", "<device>", "string: a lost GPU is to be tried now; set by `blockrelay devices retry`", "worker scheduler", "", "when it is tried, after 10 s"),
    Family("dead-letters", "", "stream of requests that ended their workers or could not be computed", "COMMIT DEAD FINISH RERUN scheduler", "", "entry: after 7 days (`BLOCKRELAY_DEAD_LETTERS_S`); trimmed to 200"),
)  # fmt: skip

#: The families by name. `inbox` is there twice: this has the one of the payload Redis.
BY_NAME = {family.name: family for family in FAMILIES}


def table() -> list[str]:
    """Returns the lines of the table in docs/redis-keys.md."""
    head = ["| key | type | written by | read by | gone |", "|---|---|---|---|---|"]
    return head + [family.row for family in FAMILIES]


@cache
def declared(script: str) -> tuple[str, ...]:
    """Returns the names of the families that `script` (in capitals) may touch."""
    return tuple(family.name for family in FAMILIES if script in family.users)


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of the keys of one cell. FAMILIES says what each holds."""

    cell: str

    def key(self, *parts: str) -> str:
        """Returns the key `{cell}:<part>:<part>`; the first part is the name of its family."""
        return ":".join((f"{{{self.cell}}}", *parts))

    def sample(self, family: str) -> str:
        """Returns a key of the family that no service uses, or its only key, to declare the family to Redis."""
        return self.key(family, "?") if BY_NAME[family].of else self.key(family)

    @property
    def all(self) -> str:
        """A pattern for SCAN that matches all keys of the cell."""
        return self.key("*")

    @property
    def status_channel(self) -> str:
        """The pub/sub channel of status events; not a key."""
        return self.key("status-events")

    @property
    def workers(self) -> str:
        return self.key("workers")

    @property
    def protocol(self) -> str:
        return self.key("protocol")

    @property
    def settings(self) -> str:
        return self.key("settings")

    @property
    def running(self) -> str:
        return self.key("running")

    @property
    def delayed(self) -> str:
        return self.key("delayed")

    @property
    def dead_letters(self) -> str:
        return self.key("dead-letters")

    def request(self, request_id: str) -> str:
        return self.key("request", request_id)

    def log(self, request_id: str) -> str:
        return self.key("log", request_id)

    def ended(self, kind: Literal["first", "last"]) -> str:
        return self.key("ended", kind)

    def result(self, request_id: str) -> str:
        return self.key("result", request_id)

    def kv_asked(self, request_id: str) -> str:
        return self.key("kv-asked", request_id)

    def kv_given(self, request_id: str) -> str:
        return self.key("kv-given", request_id)

    @property
    def results(self) -> str:
        return self.key("results")

    @property
    def result_bytes(self) -> str:
        return self.key("result-bytes")

    def trace(self, request_id: str) -> str:
        return self.key("trace", request_id)

    def page(self, name: str) -> str:
        return self.key("page", name)

    def pages(self, model: str) -> str:
        return self.key("pages", model)

    def followers(self, request_id: str) -> str:
        return self.key("followers", request_id)

    def gateway(self, gateway: str) -> str:
        return self.key("gateway", gateway)

    def wake(self, gateway: str) -> str:
        return self.key("wake", gateway)

    def moved(self, name: str) -> str:
        return self.key("moved", name)

    def session(self, session_id: str) -> str:
        return self.key("session", session_id)

    def queue(self, model: str, route_class: str) -> str:
        return self.key("queue", model, route_class)

    def due(self, model: str, route_class: str) -> str:
        return self.key("due", model, route_class)

    def shares(self, model: str, route_class: str) -> str:
        return self.key("shares", model, route_class)

    def outstanding(self, model: str) -> str:
        return self.key("outstanding", model)

    def totals(self, model: str) -> str:
        return self.key("totals", model)

    def bucket(self, tenant: str) -> str:
        return self.key("bucket", tenant)

    def jobs(self, model: str, route_class: str) -> str:
        return self.key("jobs", model, route_class)

    def reruns(self, model: str, route_class: str) -> str:
        return self.key("reruns", model, route_class)

    def pinned(self, model: str, route_class: str, numerics: str) -> str:
        return self.key("pinned", model, route_class, numerics)

    def numerics(self, model: str) -> str:
        return self.key("numerics", model)

    def worker(self, worker_id: str) -> str:
        return self.key("worker", worker_id)

    def worker_requests(self, worker_id: str) -> str:
        return self.key("worker-requests", worker_id)

    def quarantine(self, worker_id: str) -> str:
        return self.key("quarantine", worker_id)

    @property
    def lost_devices(self) -> str:
        return self.key("lost-devices")

    def device_retry(self, device: str) -> str:
        return self.key("device-retry", device)

    def renewal(self, model: str) -> str:
        return self.key("renewal", model)

    def inbox(self, worker_id: str) -> str:
        return self.key("inbox", worker_id)

    def fleet(self, model: str) -> str:
        return self.key("fleet", model)

    def plan(self, model: str) -> str:
        return self.key("plan", model)

    def plan_history(self, model: str) -> str:
        return self.key("plan-history", model)

    def measured_profile(self, model: str) -> str:
        return self.key("measured-profile", model)
