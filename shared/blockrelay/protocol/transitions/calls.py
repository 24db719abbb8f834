"""The transitions as typed calls.

A `Call` is data: script, arguments by name, how to read the answer. `blockrelay.redis.client` runs it, sync or async.
What a transition promises stands in the first lines of its script.
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
    """One invocation: `arguments` are values that msgpack knows, None for what is not given."""

    script: str
    arguments: Mapping[str, Any]
    parse: Callable[[Any], T]

    def packed(self) -> bytes:
        """The one argument of the script, beside the keys that the client adds."""
        return codec.pack_arguments(self.arguments)


@dataclass(frozen=True, slots=True)
class SessionStep:
    """The session part of ACCEPT.

    `length` = tokens before this step; `tokens` = the new ones, little-endian uint32.
    """

    session: str
    step: int
    fingerprint: str
    length: int
    tokens: bytes


@dataclass(frozen=True, slots=True)
class Binding:
    """Why a request goes to the cell that it goes to, and to no other: the name of its key or session, and the version
    of the list of cells that says so."""

    name: str
    version: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """Answer of ACCEPT.

    `detail`: Unix ms of Redis' clock (OK), state (EXISTS), pages (TOO_LARGE), expected step (STEP), request id
    (REPEAT), version of the list of cells by which the request belongs elsewhere (MOVED). OTHER: the id is taken by
    another body. NOT_EXACT: it is `exact`, and every route has a device that varies. A limit of the tenant: tokens left
    in its bucket (TOKENS), its requests under way (CONCURRENT; SHARE where there are not many more places left), bytes
    promised to its results (TENANT_RESULTS). One of
    ours: the same of all (RESULTS), requests under way (BUSY), pages promised (PAGES), ms until its first token would
    be there (WAIT) or until its end, which is too late (LATE). With a limit, `retry_ms` says when to ask again.
    """

    status: Literal[
        "OK", "EXISTS", "OTHER", "MOVED", "TOO_LARGE", "NOT_EXACT", "STEP", "REPEAT", "TOKENS", "CONCURRENT", "SHARE",
        "BUSY", "PAGES", "WAIT", "LATE", "RESULTS", "TENANT_RESULTS",
    ]  # fmt: skip
    detail: str
    retry_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What ACCEPT checks beside the number of requests under way; 0 stands for no limit.

    Of the tenant: `tokens_per_minute`, `concurrency` and `tenant_result_bytes` (of tensor results that are promised or
    stored). Ours: `result_bytes` of all tenants, `wait_s` for the first token, `overcommit` (KV pages promised for each
    that there is), `enforce_deadline` (refuse what would miss its deadline, by the workers' own measure), `share` (the
    tenant may have as many requests under way as there are places left, so that there is always one for others).
    `others` requests with `others_tokens` (prompt and max_tokens) and `others_result_bytes` come right behind this one
    without limits of their own: they are checked with it, and their tokens charged with it. With `each` they are
    checked with it, but pay for themselves, by ACCEPTs that count them again; of their tokens `others_rows` are those
    of prompts, and they need `others_pages` KV pages.
    """

    tokens_per_minute: int = 0
    concurrency: int = 0
    wait_s: float = 0.0
    overcommit: float = 0.0
    enforce_deadline: bool = False
    result_bytes: int = 0
    tenant_result_bytes: int = 0
    others: int = 0
    others_tokens: int = 0
    others_result_bytes: int = 0
    share: bool = False
    each: bool = False
    others_rows: int = 0
    others_pages: int = 0


@dataclass(frozen=True, slots=True)
class Requeued:
    """Answer of RERUN. `ended`: that run was the current one, and the request is queued again; `fallbacks` are the
    events of the stages that fell back with it."""

    ended: bool
    fallbacks: tuple[FallbackEvent, ...] = ()


#: For what was accepted once.
NO_LIMITS = Limits()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def accept(
    request: str,
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
    """`deadline_ms` is absolute Unix time in milliseconds, 0 for none. `max_in_flight` of the whole cell.

    `fingerprint` names the client's body where the id derives from a key; `retention_s` is its retention (0: as usual,
    and it is forgotten first when room is short).
    A lower `priority` is claimed earlier; within one, tenants share the workers by `weight`.
    `reader`: the gateway that reads the request if it exists already; it then counts as one of its followers.
    `result_bytes`: what its tensor result will take of the payload Redis; 0 for tokens.
    `expected_tokens`: new tokens that the books count for it, where it may have more (what is beyond them is charged at
    its end).
    `confirm`: write something even for a request that is there already, so that WAIT behind it speaks of that one too.
    `binding`: of a request with a key or a session, where there are several cells.
    """
    arguments: dict[str, Any] = {
        "request": request,
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
        "fallback": None if body.fallback == "allow" else body.fallback,
        "reader": reader,
        "result_bytes": result_bytes,
        "confirm": confirm,
        "limits": {"in_flight": max_in_flight, **asdict(limits)},
    }
    if session:
        arguments["session"] = asdict(session)
    if binding:
        arguments["binding"] = asdict(binding)

    def parse(answer: Any) -> Accepted:
        detail = _text(answer[1]) if len(answer) > 1 else ""
        return Accepted(cast(Any, _text(answer[0])), detail, int(answer[2]) if len(answer) > 2 else 0)

    return Call("accept", arguments, parse)


def claim(worker: str, most: int, *, free_pages: int) -> Call[list[Claimed]]:
    """At most `most` jobs, each under a fresh random run nonce.

    `free_pages` bounds what a worker of the whole model takes: the tokens that its jobs have now must fit. Other
    workers reserve instead, and it means nothing.
    """

    def parse(answer: Any) -> list[Claimed]:
        return [
            Claimed(
                request=_text(a[0]),
                run=_text(a[1]),
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

    arguments = {"worker": worker, "free_pages": free_pages, "runs": [token_hex(8) for _ in range(most)]}
    return Call("claim", arguments, parse)


def commit(items: Sequence[Commit]) -> Call[list[CommitAnswer]]:
    """One answer per item, in order."""

    def parse(answer: Any) -> list[CommitAnswer]:
        return [CommitAnswer(cast(Any, _text(a[0])), int(a[1])) for a in answer]

    return Call("commit", {"commits": [item.to_script() for item in items]}, parse)


def rerun(
    request: str,
    run: str,
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
    """`block` of `stage`: where a GPU failed. That is recorded as a fallback, and the next route has a CPU there; or,
    for a request that denies that, a GPU. `found`: of how many leading tokens a stage that lacked KV pages had some.
    `alone`: nobody else was computed when it ended the process that computes, so that it is to blame for that.
    `detail` and `code`: what the fallback event says of the failure as its reason and error code, where that is finer
    than `reason`, which metrics and totals keep to. `lost`: with its device, so that all stages which the process of
    that worker has in the route fell back."""

    def parse(answer: Any) -> Requeued:
        ended, *events = answer
        return Requeued(int(ended) == 1, tuple(FallbackEvent.decode(json.loads(event)) for event in events))

    finer = {"detail": detail or None, "code": code or None, "lost": lost}
    about = {"block": block or None, "stage": stage, "found": found, "alone": alone, **finer}
    arguments = {"request": request, "run": run, "reason": reason, **about}
    return Call("rerun", arguments, parse)


def finish(
    request: str,
    reason: EndReason,
    *,
    meta: dict[str, Any] | None = None,
    run: str = "",
    denied: bool = False,
    abandoned: bool = False,
    confirm: bool = False,
) -> Call[Literal["FINISHED", "DONE", "UNKNOWN", "LOST", "EARLY", "READ"]]:
    """With `run`, only while that run is current; `denied`: only while the request waits for a GPU, whose place no CPU
    may take. `expired` only behind the deadline by Redis' clock, else EARLY.

    `abandoned`: only while no gateway follows it, and ACCEPT of the same id may begin it anew. `confirm`: write
    something even for a request that has ended, so that WAIT behind it speaks of that end too.
    """
    arguments = {
        "request": request,
        "reason": reason,
        "meta": json.dumps(meta) if meta else "",
        "run": run or None,
        "denied": denied,
        "abandoned": abandoned,
        "confirm": confirm,
    }
    return Call("finish", arguments, lambda a: cast(Any, _text(a)))


def dead(
    worker: str, *, silent_s: float, reason: Literal["death", "drain", "forgotten"] = "death"
) -> Call[tuple[bool, int]]:
    """`silent_s` 0: somebody saw it end. Answer: (declared dead now, re-runs)."""
    arguments = {"worker": worker, "silent_ms": int(silent_s * 1000), "reason": reason}
    return Call("dead", arguments, lambda a: (bool(a[0]), int(a[1])))


def beat(
    worker: str, pace: Pace | None = None, *, pages_used: int | None = None, goes_on: bool = False
) -> Call[dict[str, str] | None]:
    """`pace` None: the worker has not measured itself yet. `pages_used` of its KV pages, None: as it
    said before. `goes_on`: it is in a long step, of which it has done a part since the last beat, so that nothing on it
    is stuck.

    Answer: None when the worker was declared dead, else request -> run of everything that is on it.
    """

    def parse(answer: Any) -> dict[str, str] | None:
        return None if answer is None else {_text(a[0]): _text(a[1]) for a in answer}

    arguments: dict[str, Any] = {"worker": worker}
    if pages_used is not None:
        arguments["pages_used"] = pages_used
    if goes_on:
        arguments["goes_on"] = True
    if pace:
        arguments["pace"] = pace.to_script()
    return Call("beat", arguments, parse)


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaited:
    """Re-runs that wait for a worker of a numerics id; apart, those that need more KV pages than its live ones have.

    `absent_s`: how long none has been seen that could hold them, None while one lives. `freed` more no longer wait:
    they may go on under another id.
    """

    route_class: str
    numerics: str
    waiting: int
    absent_s: float | None
    freed: int


def migrate(model: str, *, patience_s: float) -> Call[list[Awaited]]:
    """Let re-runs go on under another numerics id where no worker of theirs was left for `patience_s`."""

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
    """Answer: the epoch in force afterwards."""
    arguments = {"model": model, "replaces": replaces_epoch, "inputs": inputs, "class": route_class, "plan": plan}
    return Call("plan", arguments, int)


def upgrade(spoken: int, target: int) -> Call[bool]:
    """Raise the number of the cell from `spoken` to `target`. False: the cell speaks another number by now."""
    return Call("upgrade", {"from": spoken, "to": target}, lambda answer: int(answer) == 1)


def move(binding: Binding, *, retention_s: int, request: str = "", sessions: Sequence[str] = ()) -> Call[bool]:
    """What `binding` names belongs to another cell from now on, for `retention_s`, unless it is here: a `request` or
    one of the `sessions`. Answer: whether it is."""
    arguments = {**asdict(binding), "retention_s": retention_s, "request": request, "sessions": list(sessions)}
    return Call("move", arguments, lambda answer: _text(answer) == "HERE")


def forget(max_requests: int) -> Call[tuple[int, int]]:
    """At most `max_requests` that have ended, oldest first. Answer: (forgotten, ended ones that are still there)."""
    return Call("forget", {"max_requests": max_requests}, lambda a: (int(a[0]), int(a[1])))
