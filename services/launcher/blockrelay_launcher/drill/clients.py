"""The clients that keep a drilled system under load, and their records of each request."""

import base64
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import httpx

from blockrelay.protocol.encoding.request_ids import parse_id, public_id, sibling
from blockrelay.protocol.tensors import decode_tensor
from blockrelay_launcher.client import resuming
from blockrelay_launcher.client.resuming import TRY_AGAIN, Refused, StreamEvent
from blockrelay_launcher.drill.workload import DrillRequest

Kind = Literal["stream", "background", "cancelled", "session"]
#: Kinds of requests other than sessions, and their shares.
KINDS: list[Kind] = ["stream", "background", "cancelled"]
SHARES = (0.75, 0.15, 0.10)
#: Seconds without an event or answer after which a client counts a request as lost.
PATIENCE_S = 180.0
POLL_S = 0.25


@dataclass(slots=True)
class SeenCall:
    """A tool call that a client read."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """The record that a client keeps of one request, or of one choice of a body with several.

    Times are of the monotonic clock, in seconds.
    """

    number: int
    """Index of the request's DrillRequest in `DrillLoad.requests`."""
    kind: Kind
    started: float
    request_id: str = ""
    """Id of the request, or of the session after its first step; empty until it was accepted.

    That of a first choice names all choices, as clients see it.
    """
    choice: int = 0
    """Index of the choice in its body."""
    several: bool = False
    """Whether the body has several choices."""
    events: list[float] = field(default_factory=list[float])
    """Time of each event; of a background request each poll, of a session each step."""
    cuts: list[float] = field(default_factory=list[float])
    """Times at which the connection was lost."""
    position: int = -1
    """Position of the last event in the stream, among those of this choice."""
    repeated: int = 0
    """Number of events that came twice."""
    missing: int = 0
    """Number of events that did not come although later ones did."""
    tokens: list[int] = field(default_factory=list[int])
    text: str = ""
    content: str | None = None
    """Content of the message of a streamed chat, which has no `text`; None for others."""
    calls: list[SeenCall] = field(default_factory=list[SeenCall])
    read_again: list[SeenCall] | None = None
    """The calls that the stream had when it was read once more, from its beginning; None: it was not."""
    finish_reason: str = ""
    digests: list[str] = field(default_factory=list[str])
    """SHA-256 of the float16 logits of each step of a session."""
    fingerprints: list[str] = field(default_factory=list[str])
    """The last `system_fingerprint`, which names the workers' numerics ids; of a session one for each step."""
    error: str = ""
    fallbacks: int = 0
    """Number of moves from a GPU to a CPU."""
    ended: float | None = None
    """Time of the last event; None if the client did not see the end."""

    def take(self, position: int, data: dict[str, Any]) -> None:
        """Records one event of the stream: its position, and its JSON object `data`."""
        self.events.append(time.monotonic())
        if position <= self.position:
            self.repeated += 1
            return
        self.missing += position - max(0, self.position) - 1 if position else 0
        self.position = position
        if "error" in data:
            self.error = str(data["error"].get("message"))
        if data.get("system_fingerprint"):
            self.fingerprints = [data["system_fingerprint"]]
        self.fallbacks += len(data.get("fallback_events") or ())
        for choice in data.get("choices", ()):
            self.tokens += choice.get("token_ids") or ()
            self.text += choice.get("text") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if (delta := choice.get("delta")) is not None:
                self.content = (self.content or "") + (delta.get("content") or "")
                for call in delta.get("tool_calls", ()):
                    self._join(call)

    def stay(self, position: int) -> None:
        """Compares its position with that in an event of another choice, which must be the same."""
        self.repeated += position < max(0, self.position)
        self.missing += max(0, position - max(0, self.position))
        self.position = max(position, self.position)

    def _join(self, delta: dict[str, Any]) -> None:
        """Adds a part of a call; the first part of each has its index, id and name. Raises ValueError otherwise."""
        function = delta["function"]
        if "id" in delta:
            self.calls.append(SeenCall(delta["id"], function["name"], ""))
        if delta["index"] != len(self.calls) - 1 or ("id" in delta) != ("name" in function):
            raise ValueError(f"a part of call {delta['index'] + 1} came behind {len(self.calls)} calls")
        self.calls[-1].arguments += function.get("arguments", "")


def take_event(choices: Sequence[RequestRecord], event_id: str, data: dict[str, Any]) -> None:
    """Records an event of the stream of all `choices` of a body, by its id `<request>:<position>.<position>…`.

    It is an event of the choice in its JSON object `data`; an error is one of the choice that moved. Raises ValueError
    for an id with another number of positions.
    """
    request_id, _, places = event_id.rpartition(":")
    positions = [int(place) for place in places.split(".")]
    moved = (one.choice for one, at in zip(choices, positions, strict=True) if at > max(0, one.position))
    own = next((choice["index"] for choice in data.get("choices", ())), None)
    own = next(moved, 0) if own is None else own
    name_choices(choices, request_id)
    for one, position in zip(choices, positions, strict=True):
        one.take(position, data) if one.choice == own else one.stay(position)


def name_choices(choices: Sequence[RequestRecord], request_id: str) -> None:
    """Gives all `choices` of a body their ids; `request_id` is the one that clients see for the body."""
    parsed = parse_id(request_id)
    for one in choices:
        one.request_id = request_id
        if parsed is not None and one.choice > 0:
            one.request_id = public_id(sibling(parsed.request_id, one.choice), parsed.cell)


def records_of(number: int, ask: DrillRequest, kind: Kind) -> list[RequestRecord]:
    """Returns new records for the choices of a request that is sent now; `number` is its index."""
    numbers, now = (number, *ask.others), time.monotonic()
    return [
        RequestRecord(number=one, kind=kind, started=now, choice=index, several=len(numbers) > 1)
        for index, one in enumerate(numbers)
    ]


def _give_up(choices: Sequence[RequestRecord], why: str) -> None:
    """Records the error for the choices that have not ended."""
    for one in choices:
        if one.ended is None:
            one.error = why


class Abandoned(Exception):
    """The drill has ended before the request did."""


@dataclass(slots=True)
class DrillLoad:
    """The load of a drill: threads that each have one request under way, drawn at random from `requests`."""

    urls: Sequence[str]
    """The gateways."""
    requests: Sequence[DrillRequest]
    clients: int
    """Number of threads."""
    rng: Random
    seen: list[RequestRecord] = field(default_factory=list[RequestRecord], init=False)
    """The records of all requests so far."""
    left_out: set[int] = field(default_factory=set[int], init=False)
    """Indexes of the requests that are not sent."""
    logits: dict[str, str] = field(default_factory=dict[str, str], init=False)
    """Base64 of the float16 logits of all steps of sessions, by their digests."""
    _over: threading.Event = field(default_factory=threading.Event, init=False)
    _now: threading.Event = field(default_factory=threading.Event, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _threads: list[threading.Thread] = field(default_factory=list[threading.Thread], init=False)

    def start(self) -> None:
        """Starts all clients."""
        for n in range(self.clients):
            rng = Random(self.rng.getrandbits(64))
            self._threads.append(threading.Thread(target=self._client, args=(rng,), name=f"client-{n}", daemon=True))
            self._threads[-1].start()

    def finish(self) -> None:
        """Stops new requests; running ones continue."""
        self._over.set()

    @property
    def idle(self) -> bool:
        """True when no request is running any more."""
        return not any(thread.is_alive() for thread in self._threads)

    def abandon(self) -> None:
        """Makes clients give up at their next check; the end of the system wakes those that read."""
        self._over.set()
        self._now.set()

    def join(self) -> None:
        """Waits until all clients have ended. Call `finish` or `abandon` first."""
        for thread in self._threads:
            thread.join()

    def _client(self, rng: Random) -> None:
        numbers = [number for number in range(len(self.requests)) if number not in self.left_out]
        while not self._over.is_set():
            number = rng.choice(numbers)
            ask = self.requests[number]
            kind: Kind = "session" if ask.cuts else rng.choices(KINDS, SHARES)[0]
            choices = records_of(number, ask, kind)
            with self._lock:
                self.seen += choices
            body = ask.body()
            if rng.random() < 0.5:  # a salt of its own: no prefix hit
                body["cache_salt"] = f"{rng.getrandbits(64):x}"
            key = f"drill-{rng.getrandbits(96):024x}"
            try:
                if kind == "session":
                    self._session(choices[0], key, rng)
                elif kind == "background":
                    self._background(choices, body, key, rng)
                else:
                    self._stream(choices, body, key, rng)
            except Abandoned:
                return
            except Refused as error:
                _give_up(choices, f"refused: {error}")
            except Exception as error:  # a client must not end silently: the request counts as lost
                _give_up(choices, f"{type(error).__name__}: {error}")
                if not isinstance(error, httpx.HTTPError | ValueError | KeyError):
                    raise

    def _check_abandoned(self) -> None:
        if self._now.is_set():
            raise Abandoned

    def _stream(self, choices: Sequence[RequestRecord], body: dict[str, Any], key: str, rng: Random) -> None:
        """Streams a request; one that is to be cancelled is cancelled after some tokens, with all its choices.

        A stream with tool calls is read once more from its beginning, when it has ended.
        """

        def cut(why: str) -> None:
            for one in choices:
                one.cuts.append(time.monotonic())
            self._check_abandoned()

        first = choices[0]
        enough = rng.randint(1, 30) if first.kind == "cancelled" else None
        for number, event in enumerate(self._events(first.number, body, key, cut), 1):
            take_event(choices, event.id, event.data)
            self._check_abandoned()
            if number == enough:
                self._delete(first, rng)
        ended = time.monotonic()
        if first.kind == "stream" and any(one.calls for one in choices):
            again = records_of(first.number, self.requests[first.number], "stream")
            for event in self._events(first.number, body, key, lambda why: self._check_abandoned()):
                take_event(again, event.id, event.data)
            for one, other in zip(choices, again, strict=True):
                one.read_again = other.calls
        for one in choices:
            one.ended = ended

    def _events(
        self, number: int, body: dict[str, Any], key: str, retrying: Callable[[str], None]
    ) -> Iterator[StreamEvent]:
        path = self.requests[number].path
        return resuming.resuming_stream(self.urls, path, body, key=key, patience_s=PATIENCE_S, retrying=retrying)

    def _delete(self, seen: RequestRecord, rng: Random) -> None:
        """Cancels a request. An unknown one (404) is no error, and its stream goes on.

        It had ended and was forgotten early for lack of memory, or Redis lost the end of its log.
        """
        try:
            self._ask("DELETE", f"/v1/requests/{seen.request_id}", rng)
        except Refused as error:
            if error.status != 404:
                raise

    def _background(self, choices: Sequence[RequestRecord], body: dict[str, Any], key: str, rng: Random) -> None:
        """Sends a background request and polls its choices, at any gateway, until they have ended."""

        def send() -> None:
            path = self.requests[choices[0].number].path
            answer = self._ask("POST", path, rng, {**body, "background": True}, {"Idempotency-Key": key})
            name_choices(choices, json.loads(answer.content)["id"])

        send()
        for one in choices:
            self._poll(one, rng, missing=send)

    def _poll(self, seen: RequestRecord, rng: Random, missing: Callable[[], None]) -> None:
        """Polls a request until it has ended; `missing` is called if it is unknown (see `_ask`)."""
        while True:
            self._now.wait(POLL_S)
            self._check_abandoned()
            answer = self._ask("GET", f"/v1/requests/{seen.request_id}", rng, missing=missing)
            state = answer.json()
            seen.events.append(time.monotonic())
            if state["status"] not in ("queued", "running"):
                seen.tokens, seen.text = state["token_ids"], state["text"]
                for call in state.get("tool_calls", ()):
                    seen.calls.append(SeenCall(call["id"], call["function"]["name"], call["function"]["arguments"]))
                seen.finish_reason = state["finish_reason"] or ""
                seen.fingerprints = [state["system_fingerprint"] or ""]
                seen.error = str((state["error"] or {}).get("message", ""))
                seen.fallbacks = len(state.get("fallback_events") or ())
                seen.ended = time.monotonic()
                return

    def _session(self, seen: RequestRecord, key: str, rng: Random) -> None:
        """Runs the steps of a tensor session in order. Each step has an idempotency key, so that it may be repeated."""
        for number in range(1, len(self.requests[seen.number].cuts) + 1):
            body = {**self.requests[seen.number].step(number), "session_id": key}
            answer = self._ask("POST", "/v1/infer", rng, body, {"Idempotency-Key": f"{key}-{number}"}).json()
            seen.events.append(time.monotonic())
            seen.request_id = key
            logits = decode_tensor(answer["outputs"]["logits"], param="logits", max_elements=1 << 24)
            seen.fingerprints.append(answer["system_fingerprint"] or "")
            seen.fallbacks += len(answer.get("fallback_events") or ())
            row = logits.astype("<f2").tobytes()
            seen.digests.append(hashlib.sha256(row).hexdigest())
            self.logits.setdefault(seen.digests[-1], base64.b64encode(row).decode())
        seen.ended = time.monotonic()

    def _ask(
        self,
        method: str,
        path: str,
        rng: Random,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        missing: Callable[[], None] | None = None,
    ) -> httpx.Response:
        """Makes one HTTP call, at one gateway after the other until one answers. Raises Refused.

        `missing` is called if the request is unknown: a Redis that lost the end of its log forgot it, and sending the
        same key again restores it.
        """
        gateway, end = rng.randrange(len(self.urls)), time.monotonic() + PATIENCE_S
        why: Refused = Refused(0, "no gateway answers")
        while time.monotonic() < end:
            self._check_abandoned()
            try:
                url = self.urls[gateway % len(self.urls)] + path
                timeout = httpx.Timeout(30, connect=2)
                answer = httpx.request(method, url, json=body, headers=headers, timeout=timeout, trust_env=False)
                if answer.is_success:
                    return answer
                why = Refused(answer.status_code, answer.text[:300])
                if answer.status_code == 404 and missing is not None:
                    missing()
                elif answer.status_code not in TRY_AGAIN:
                    raise why
            except httpx.TransportError as error:
                why = Refused(0, repr(error))
            gateway += 1
            time.sleep(0.1)
        raise why
