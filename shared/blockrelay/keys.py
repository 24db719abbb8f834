"""Every Redis key, in one table. All keys of a cell share the hash tag `{cell}` and so one slot.

| key | type | written by | read by | gone |
|---|---|---|---|---|
| `{cell}:request:<id>` | hash, the record | ACCEPT, CLAIM, COMMIT, RERUN, FINISH, DEAD | all | retention after the end |
| `{cell}:log:<id>` | stream, the token log; entry id = position | COMMIT, FINISH (terminal entry) | gateway, last stage | as the record |
| `{cell}:running` | zset id -> ms of last progress; every request not finished | ACCEPT..FINISH | scheduler | member: at the end |
| `{cell}:queue:<model>:<class>` | zset of first runs, id -> rank | ACCEPT | CLAIM | member: CLAIM, FINISH |
| `{cell}:due:<model>:<class>` | zset of those with a deadline, id -> ms by which it should be claimed | ACCEPT | CLAIM | member: CLAIM, FINISH |
| `{cell}:shares:<model>:<class>` | zset of ranks: the virtual time of each priority, where each tenant's next first run stands | ACCEPT, CLAIM | ACCEPT | when the queue was empty |
| `{cell}:jobs:<model>:<class>` | stream that wakes workers; its one entry means nothing | ACCEPT | workers | never |
| `{cell}:reruns:<model>:<class>` | stream of request ids, re-runs (claimed first) | RERUN, DEAD | CLAIM; workers | entry: CLAIM, FINISH |
| `{cell}:delayed` | zset id -> ms from which the job of its re-run may be queued | RERUN, DEAD | CLAIM, BEAT | member: CLAIM, BEAT, FINISH |
| `{cell}:load:<model>` | hash: rows, tokens and pages that unfinished requests still cost | ACCEPT, CLAIM, COMMIT, RERUN, FINISH | ACCEPT | never |
| `{cell}:of:<tenant>` | set of its unfinished requests | ACCEPT, FINISH | ACCEPT | member: at the end |
| `{cell}:bucket:<tenant>` | hash: tokens left of its minute, and when | ACCEPT | ACCEPT | 120 s after the last use |
| `{cell}:workers` | zset worker -> ms of last beat | worker, BEAT | scheduler, CLAIM | member: DEAD |
| `{cell}:worker:<id>` | hash: model, device, stage, pages, reserved, pace | worker, CLAIM, release | scheduler, CLAIM | DEAD |
| `{cell}:on:<worker>` | set of requests whose route has the worker | CLAIM, release | BEAT, DEAD | DEAD |
| `{cell}:trying:<worker>` | string, the request that the worker tries alone | CLAIM, worker | DEAD | after the try, DEAD |
| `{cell}:inbox:<worker>` | stream of next jobs and ends (control Redis) or forwarded rows and early next jobs (payload Redis) | COMMIT, release; stage before, last stage | worker | DEAD |
| `{cell}:plan:<model>` | hash: epoch, inputs, class, plan | PLAN | all | never |
| `{cell}:session:<id>` | hash: step, fp, request, tokens | ACCEPT | gateway | retention after the last step |
| `{cell}:result:<id>` | string, tensor outputs (payload Redis) | last stage | gateway | retention |
| `{cell}:page:<name>` | hash, block -> KV page (payload Redis) | worker | worker | unused for the page store's time, or pushed out |
| `{cell}:pages:<model>` | zset page -> ms of last use (payload Redis) | worker | worker | member: with its page |
| `{cell}:wake:<gateway>` | stream, interrupts a gateway's blocking read | that gateway | that gateway | 60 s after the last use |
| `{cell}:followers:<id>` | hash of the gateways that read a log which more than one has read | gateway, ACCEPT | FINISH | retention |
| `{cell}:gateway:<id>` | string, this gateway lives | that gateway | FINISH | 15 s after the last beat |
| `{cell}:dead-letters` | stream of requests that killed their workers or could not be computed | DEAD, FINISH | people | trimmed to 200 |

`<model>` is the first 16 hex digits of the model hash; `<class>` is `gpu` (GPU workers allowed) or `cpu`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names of one cell."""

    cell: str

    def _key(self, *parts: str) -> str:
        return ":".join((f"{{{self.cell}}}", *parts))

    @property
    def workers(self) -> str:
        return self._key("workers")

    @property
    def running(self) -> str:
        return self._key("running")

    @property
    def delayed(self) -> str:
        return self._key("delayed")

    @property
    def dead_letters(self) -> str:
        return self._key("dead-letters")

    def request(self, request_id: str) -> str:
        return self._key("request", request_id)

    def log(self, request_id: str) -> str:
        return self._key("log", request_id)

    def result(self, request_id: str) -> str:
        return self._key("result", request_id)

    def page(self, name: str) -> str:
        return self._key("page", name)

    def pages(self, model: str) -> str:
        return self._key("pages", model)

    def followers(self, request_id: str) -> str:
        return self._key("followers", request_id)

    def gateway(self, gateway: str) -> str:
        return self._key("gateway", gateway)

    def wake(self, gateway: str) -> str:
        return self._key("wake", gateway)

    def session(self, session_id: str) -> str:
        return self._key("session", session_id)

    def queue(self, model: str, route_class: str) -> str:
        return self._key("queue", model, route_class)

    def due(self, model: str, route_class: str) -> str:
        return self._key("due", model, route_class)

    def shares(self, model: str, route_class: str) -> str:
        return self._key("shares", model, route_class)

    def load(self, model: str) -> str:
        return self._key("load", model)

    def of(self, tenant: str) -> str:
        return self._key("of", tenant)

    def bucket(self, tenant: str) -> str:
        return self._key("bucket", tenant)

    def jobs(self, model: str, route_class: str) -> str:
        return self._key("jobs", model, route_class)

    def reruns(self, model: str, route_class: str) -> str:
        return self._key("reruns", model, route_class)

    def worker(self, worker_id: str) -> str:
        return self._key("worker", worker_id)

    def on(self, worker_id: str) -> str:
        return self._key("on", worker_id)

    def trying(self, worker_id: str) -> str:
        return self._key("trying", worker_id)

    def inbox(self, worker_id: str) -> str:
        return self._key("inbox", worker_id)

    def plan(self, model: str) -> str:
        return self._key("plan", model)
