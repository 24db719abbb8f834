"""The scripts as typed calls: each function returns a `Call` that `blockrelay.redis.client` runs, sync or async.

The first lines of a script (`lua/<name>.lua`) say what it guarantees, and explain its arguments and answers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from secrets import token_hex
from typing import Any, Generic, Literal, TypeVar, cast

from blockrelay.protocol.capabilities import Pace
from blockrelay.protocol.encoding import codec
from blockrelay.protocol.encoding.fallback_event import FallbackEvent
from blockrelay.protocol.messages import Claimed, Commit, CommitAnswer, EndReason, RequestBody, RerunReason

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One call of a script, as data."""

    script: str  # its name in lower case
    arguments: Mapping[str, Any]  # values that msgpack knows; None: not given
    parse: Callable[[Any], T]  # makes the result of the script's answer

    def packed(self) -> bytes:
        """Returns the script's only argument, ARGV[1]; the client adds the keys."""
        return codec.pack_for_script(self.arguments)


@dataclass(frozen=True, slots=True)
class SessionStep:
    """A step of a session, as an argument of ACCEPT."""

    session: str
    step: int
    fingerprint: str  # of the client's body, to recognise a repeated step
    length: int  # tokens of the session before this step
    tokens: bytes  # the new tokens, little-endian uint32


@dataclass(frozen=True, slots=True)
class Binding:
    """The reason why a request must go to one particular cell."""

    name: str  # of its idempotency key or session
    version: int  # of the list of cells by which the gateway chose the cell


@dataclass(frozen=True, slots=True)
class Accepted:
    """The answer of ACCEPT. `detail` depends on `status`; for a limit, `retry_ms` says after how long to try again.

    OK: Unix ms of Redis' clock. EXISTS: state of the request. OTHER: the id belongs to another body. MOVED: version of
    the list of cells that gives the request to another cell. STEP: expected step. REPEAT: id of the request that is
    this step. TOO_LARGE: KV pages of the largest pool of a stage. NOT_EXACT: it is `exact`, and every route has a
    nondeterministic device. NO_GRAMMAR: no worker reads grammars as the gateway does.

    Limits of the tenant. TOKENS: tokens left in its bucket. CONCURRENT: its unfinished requests; SHARE: the same, where
    the cell has few places left. TENANT_RESULTS: bytes promised to its tensor results.
    Limits of the cell. RESULTS: bytes promised to all tensor results. BUSY: unfinished requests. PAGES: KV pages
    promised. WAIT: ms until the first token. LATE: ms until the end, which is behind the deadline; 0 if no worker has
    measured itself.
    """

    status: Literal[
        "OK", "EXISTS", "OTHER", "MOVED", "TOO_LARGE", "NO_GRAMMAR", "NOT_EXACT", "STEP", "REPEAT", "TOKENS",
        "CONCURRENT", "SHARE", "BUSY", "PAGES", "WAIT", "LATE", "RESULTS", "TENANT_RESULTS",
    ]  # fmt: skip
    detail: str
    retry_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits that ACCEPT checks beside the number of unfinished requests; 0 is no limit.

    The `others` are requests of the same client body that follow this one. ACCEPT checks the limits for all at once and
    charges their tokens here; the caller then accepts them without limits. With `each` it charges only this one, and
    each of the others is charged by its own ACCEPT.
    """

    tokens_per_minute: int = 0  # of the tenant
    concurrency: int = 0  # unfinished requests of the tenant
    wait_s: float = 0.0  # until the first token, as forecast
    overcommit: float = 0.0  # KV pages promised, for each one that workers have
    enforce_deadline: bool = False  # refuses a request that the forecast ends behind its deadline
    result_bytes: int = 0  # tensor results of all tenants, promised or stored
    tenant_result_bytes: int = 0  # the same of the tenant
    others: int = 0
    others_tokens: int = 0  # prompt tokens and max_tokens of the others
    others_result_bytes: int = 0
    share: bool = False  # the tenant may have as many unfinished requests as places are left, so others get one
    each: bool = False
    others_rows: int = 0  # with `each`: prompt tokens of the others
    others_pages: int = 0  # with `each`: KV pages of the others


@dataclass(frozen=True, slots=True)
class Requeued:
    """The answer of RERUN."""

    ended: bool  # the run was the current one; the request is queued again, or has ended
    fallbacks: tuple[FallbackEvent, ...] = ()  # one for each stage that fell back


#: For a request whose limits were checked before.
NO_LIMITS = Limits()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def accept(
    request_id: str,
    body: RequestBody,
    *,
    model: str,
    pages_needed: int,
    max_in_flight: int,
    deadline_ms: int = 0,
    fingerprint: str = "",
    retention_s: int = 0,
    session: SessionStep | None = None,
    tenant: str = "",
    weight: float = 1.0,
    priority: int = 0,
    limits: Limits = NO_LIMITS,
    reader: str = "",
    result_bytes: int = 0,
    confirm: bool = False,
    binding: Binding | None = None,
    expected_tokens: int | None = None,
) -> Call[Accepted]:
    """Checks limits, writes the record of a request and queues it.

    pages_needed     KV pages that it may need at most
    deadline_ms      Unix time; 0 = none
    fingerprint      identifies the client's body where the id derives from an idempotency key
    retention_s      how long its end can be read; 0 = as the cell sets it, and forgotten first when memory is short
    tenant           whose limits count, and whose alone the request is; "": there are no keys
    priority         a lower one is claimed earlier; tenants of one priority share the workers by `weight`
    reader           gateway that will read the request if it exists already
    result_bytes     size of its tensor result on the payload Redis; 0 for tokens
    confirm          writes even if the request exists, so that a WAIT after the call covers that request too
    binding          for a request with a key or session where there are several cells
    expected_tokens  new tokens to account for instead of max_tokens; more are charged at the end
    """
    arguments: dict[str, Any] = {
        "request": request_id,
        "model": model,
        "pages_needed": pages_needed,
        "deadline_ms": deadline_ms,
        "body": body.encode(),
        "prompt_tokens": int(body.prompt.size),
        "max_tokens": int(body.params.get("max_tokens") or 0) if expected_tokens is None else expected_tokens,
        "fingerprint": fingerprint,
        "retention_s": retention_s,
        "tenant": tenant,
        "weight": weight,
        "priority": priority,
        "exact": body.exact,
        "grammar": body.grammar_id,
        "fallback": None if body.fallback == "allow" else body.fallback,
        "reader": reader,
        "result_bytes": result_bytes,
        "confirm": confirm,
        "limits": {"in_flight": max_in_flight, **asdict(limits)},
        "session": asdict(session) if session else None,
        "binding": asdict(binding) if binding else None,
    }

    def parse(answer: Any) -> Accepted:
        detail = _text(answer[1]) if len(answer) > 1 else ""
        return Accepted(cast(Any, _text(answer[0])), detail, int(answer[2]) if len(answer) > 2 else 0)

    return Call("accept", arguments, parse)


def claim(worker_id: str, max_jobs: int, *, free_pages: int) -> Call[list[Claimed]]:
    """Takes at most `max_jobs` queued requests for a worker of the first stage, each under a new random run id.

    `free_pages` are the KV pages free on a worker that runs the whole model: the present tokens of its requests must
    fit. A route of several workers reserves pages instead and ignores it.
    """

    def parse(answer: Any) -> list[Claimed]:
        return [
            Claimed(
                request_id=_text(a[0]),
                run_id=_text(a[1]),
                route=tuple(_text(a[2]).split(",")),
                route_class=cast(Any, _text(a[3])),
                waited_s=int(a[4]) / 1000,
                quarantined=bool(a[5]),
                packed=a[7],
                tokens=tuple(int(t) for t in a[8]),
                left_s=int(a[9]) / 1000 if int(a[9]) >= 0 else None,
                reruns=int(a[10]),
                private=bool(a[11]),
                reusable=int(a[6]) if int(a[6]) >= 0 else None,
            )
            for a in answer
        ]

    arguments = {"worker": worker_id, "free_pages": free_pages, "runs": [token_hex(8) for _ in range(max_jobs)]}
    return Call("claim", arguments, parse)


def commit(items: Sequence[Commit]) -> Call[list[CommitAnswer]]:
    """Appends tokens to the logs of many requests; the result has one answer per item, in order."""

    def parse(answer: Any) -> list[CommitAnswer]:
        return [CommitAnswer(cast(Any, _text(a[0])), int(a[1])) for a in answer]

    return Call("commit", {"commits": [item.to_script() for item in items]}, parse)


def rerun(
    request_id: str,
    run_id: str,
    reason: RerunReason,
    *,
    block: str = "",
    stage: int = 0,
    found: int | None = None,
    alone: bool = False,
    detail: str = "",
    code: str = "",
    lost: bool = False,
) -> Call[Requeued]:
    """Ends the run `run_id`, if it is the current one, and queues the request again.

    With the reason "death" it ends the request with an error if that has ended too many workers.

    block, stage  where a GPU failed. It is recorded as a fallback, and the next route has a CPU there; or a GPU, if the
                  request denies fallbacks
    found         leading tokens whose KV pages a stage had, if it lacked some; None = not known
    alone         no other request was computed when the computing process ended, so this one is to blame
    detail, code  reason and error code of the fallback event, where they are more precise than `reason`
    lost          the whole device failed, so that all stages of the worker's process in the route fell back
    """

    def parse(answer: Any) -> Requeued:
        ended, *events = answer
        return Requeued(int(ended) == 1, tuple(FallbackEvent.decode(json.loads(event)) for event in events))

    finer = {"detail": detail or None, "code": code or None, "lost": lost}
    about = {"block": block or None, "stage": stage, "found": found, "alone": alone, **finer}
    arguments = {"request": request_id, "run": run_id, "reason": reason, **about}
    return Call("rerun", arguments, parse)


def finish(
    request_id: str,
    reason: EndReason,
    *,
    meta: dict[str, Any] | None = None,
    run_id: str = "",
    denied: bool = False,
    abandoned: bool = False,
    confirm: bool = False,
) -> Call[Literal["FINISHED", "DONE", "UNKNOWN", "LOST", "EARLY", "READ"]]:
    """Ends a request for `reason`.

    Results: FINISHED; DONE: it had ended before; UNKNOWN: there is no such request; LOST: another run is current, or it
    does not wait for a GPU; EARLY: `reason` is "expired", but it has no deadline, or time is left by Redis' clock;
    READ: it is not abandoned.

    meta       what the terminal entry of the log says about the end, as JSON; None: nothing
    run_id     only while this run is the current one; "": whatever run is
    denied     only while the request waits for a GPU because it denies fallbacks
    abandoned  only while no gateway reads it; ACCEPT of the same id may then start it again
    confirm    writes even if the request has ended, so that a WAIT after the call covers that end too
    """
    arguments = {
        "request": request_id,
        "reason": reason,
        "meta": json.dumps(meta) if meta else "",
        "run": run_id or None,
        "denied": denied,
        "abandoned": abandoned,
        "confirm": confirm,
    }
    return Call("finish", arguments, lambda a: cast(Any, _text(a)))


def dead(
    worker_id: str, *, silent_s: float, reason: Literal["death", "drain", "forgotten"] = "death"
) -> Call[tuple[bool, int]]:
    """Declares a worker dead if it had no heartbeat for `silent_s` seconds, and queues its requests again.

    `silent_s` 0: its process was seen to end. Result: (whether this call declared it dead, number of re-runs). A
    request that has ended too many workers ends with an error instead, and counts too.
    """
    arguments = {"worker": worker_id, "silent_ms": int(silent_s * 1000), "reason": reason}
    return Call("dead", arguments, lambda a: (bool(a[0]), int(a[1])))


def heartbeat(
    worker_id: str,
    pace: Pace | None = None,
    *,
    pages_used: int | None = None,
    goes_on: bool = False,
    block_times: str = "",
    memory: tuple[int, int] | None = None,
) -> Call[dict[str, str] | None]:
    """Sends a worker's heartbeat. The result is request id -> run id of all that is on the worker; None if it is dead.

    `goes_on`: it is in a long step and has done part of it since the last heartbeat, so that its requests are not
    stuck. `block_times`: the JSON of BlockTimes. `memory`: bytes of its stage, and free ones. Default: as before.
    """

    def parse(answer: Any) -> dict[str, str] | None:
        return None if answer is None else {_text(a[0]): _text(a[1]) for a in answer}

    arguments = {
        "worker": worker_id,
        "pages_used": pages_used,
        "goes_on": goes_on,
        "pace": pace.to_script() if pace else None,
        "block_times": block_times or None,
        "memory": memory and {"held": memory[0], "free": memory[1]},
    }
    return Call("beat", arguments, parse)


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaited:
    """Re-runs that wait for a worker of a numerics id; those too large for its live workers are counted apart."""

    route_class: str
    numerics: str
    waiting: int
    absent_s: float | None  # how long no worker was seen that could hold them; None while one lives
    freed: int  # further re-runs that wait no longer: they may continue under another id


def migrate(model: str, *, patience_s: float) -> Call[list[Awaited]]:
    """Lets re-runs continue under another numerics id where their own had no worker that could hold them.

    That must have been so for `patience_s` seconds, as calls of this script saw it.
    """

    def parse(answer: Any) -> list[Awaited]:
        return [
            Awaited(
                route_class=_text(a[0]),
                numerics=_text(a[1]),
                waiting=int(a[2]),
                absent_s=int(a[3]) / 1000 if int(a[3]) >= 0 else None,
                freed=int(a[4]),
            )
            for a in answer
        ]

    return Call("migrate", {"model": model, "patience_ms": int(patience_s * 1000)}, parse)


def publish_plan(model: str, *, replaces_epoch: int, inputs: str, route_class: str, plan: str) -> Call[int]:
    """Publishes a plan if the plan in force has epoch `replaces_epoch` and other `inputs`; `plan` is JSON.

    The result is the epoch in force afterwards. `inputs` is a hash of what the plan was computed from.
    """
    arguments = {"model": model, "replaces": replaces_epoch, "inputs": inputs, "class": route_class, "plan": plan}
    return Call("plan", arguments, int)


def publish_slowdowns(model: str, slowdowns: Mapping[str, float]) -> Call[int]:
    """Publishes how many times as long stages take on a CPU as on a GPU, by first and last block, `3-5`.

    The result is the epoch of the plan in force, which stays the same.
    """
    return Call("plan", {"model": model, "slowdowns": json.dumps(slowdowns, separators=(",", ":"))}, int)


def upgrade(spoken: int, target: int) -> Call[bool]:
    """Raises the protocol number of the cell from `spoken` to `target`; False if it is no longer `spoken`."""
    return Call("upgrade", {"from": spoken, "to": target}, lambda answer: int(answer) == 1)


def move(binding: Binding, *, retention_s: int, request_id: str = "", sessions: Sequence[str] = ()) -> Call[bool]:
    """Records for `retention_s` that the key or session of `binding` belongs to another cell.

    It records nothing, and the result is True, if the `request_id` or one of the `sessions` of that name is here.
    """
    arguments = {**asdict(binding), "retention_s": retention_s, "request": request_id, "sessions": list(sessions)}
    return Call("move", arguments, lambda answer: _text(answer) == "HERE")


def forget(max_requests: int) -> Call[tuple[int, int]]:
    """Deletes at most `max_requests` ended requests, oldest first, those with a retention of their own last.

    It passes over requests that ended or were read in the last 10 s. Result: (deleted, ended requests still there).
    """
    return Call("forget", {"max_requests": max_requests}, lambda a: (int(a[0]), int(a[1])))
