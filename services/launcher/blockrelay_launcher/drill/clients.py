"""Clients that keep a system loaded, and what each of them saw."""

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

from blockrelay.protocol.tensors import decode_tensor
from blockrelay_launcher.client import resuming
from blockrelay_launcher.client.resuming import TRY_AGAIN, Refused
from blockrelay_launcher.drill.workload import Ask

Kind = Literal["stream", "background", "cancelled", "session"]
#: How a request without steps is sent, and in which shares.
KINDS: list[Kind] = ["stream", "background", "cancelled"]
SHARES = (0.75, 0.15, 0.10)
#: Seconds without any sign of a request after which a client gives it up for lost.
PATIENCE_S = 180.0
POLL_S = 0.25


@dataclass(slots=True, kw_only=True)
class Seen:
    """What one client saw of one request. Times are monotonic.

    `request` as the gateway calls it; `events` when each event came; `cuts` when the connection was lost; `repeated`
    events that came twice; `ended` when the last event came, None for a request that nobody saw the end of.
    `fingerprints`: who computed it, as the last event said; of a session one for each step. `fallbacks`: how often it
    went from a GPU to a CPU.
    """

    ask: int
    kind: Kind
    started: float
    request: str = ""
    events: list[float] = field(default_factory=list[float])
    cuts: list[float] = field(default_factory=list[float])
    position: int = -1
    repeated: int = 0
    tokens: list[int] = field(default_factory=list[int])
    text: str = ""
    finish_reason: str = ""
    digests: list[str] = field(default_factory=list[str])
    fingerprints: list[str] = field(default_factory=list[str])
    error: str = ""
    fallbacks: int = 0
    ended: float | None = None

    @property
    def accepted(self) -> bool:
        return bool(self.request)

    def take(self, event_id: str, data: dict[str, Any]) -> None:
        """One event of the stream."""
        request, _, position = event_id.rpartition(":")
        self.events.append(time.monotonic())
        self.request = request or self.request
        if int(position) <= self.position:
            self.repeated += 1
            return
        self.position = int(position)
        if "error" in data:
            self.error = str(data["error"].get("message"))
        if data.get("system_fingerprint"):
            self.fingerprints = [data["system_fingerprint"]]
        self.fallbacks += len(data.get("fallback_events") or ())
        for choice in data.get("choices", ()):
            self.tokens += choice.get("token_ids") or ()
            self.text += choice.get("text") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


class Abandoned(Exception):
    """The drill ends before the request does."""


@dataclass(slots=True)
class Load:
    """`clients` threads, each with one request under way; `asks` are drawn at random. `logits`: base64 of the float16
    logits of all steps of sessions, by their digests."""

    urls: Sequence[str]
    asks: Sequence[Ask]
    clients: int
    rng: Random
    seen: list[Seen] = field(default_factory=list[Seen], init=False)
    logits: dict[str, str] = field(default_factory=dict[str, str], init=False)
    _over: threading.Event = field(default_factory=threading.Event, init=False)
    _now: threading.Event = field(default_factory=threading.Event, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _threads: list[threading.Thread] = field(default_factory=list[threading.Thread], init=False)

    def start(self) -> None:
        for n in range(self.clients):
            rng = Random(self.rng.getrandbits(64))
            self._threads.append(threading.Thread(target=self._client, args=(rng,), name=f"client-{n}", daemon=True))
            self._threads[-1].start()

    def finish(self) -> None:
        """Nothing new; what is under way goes on."""
        self._over.set()

    @property
    def idle(self) -> bool:
        """Nothing is under way any more."""
        return not any(thread.is_alive() for thread in self._threads)

    def abandon(self) -> None:
        """Clients give up at their next look; the end of the system wakes those that read."""
        self._over.set()
        self._now.set()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _client(self, rng: Random) -> None:
        while not self._over.is_set():
            ask = rng.randrange(len(self.asks))
            kind: Kind = "session" if self.asks[ask].cuts else rng.choices(KINDS, SHARES)[0]
            seen = Seen(ask=ask, kind=kind, started=time.monotonic())
            with self._lock:
                self.seen.append(seen)
            body = self.asks[ask].body()
            if rng.random() < 0.5:  # computed from its beginning, whatever is known
                body["cache_salt"] = f"{rng.getrandbits(64):x}"
            key = f"drill-{rng.getrandbits(96):024x}"
            try:
                if kind == "session":
                    self._session(seen, key, rng)
                else:
                    run = {"stream": self._stream, "background": self._background, "cancelled": self._cancel}[kind]
                    run(seen, body, key, rng)
            except Abandoned:
                return
            except Refused as error:
                seen.error = f"refused: {error}"
            except Exception as error:  # a client must not end silently: the request counts as lost
                seen.error = f"{type(error).__name__}: {error}"
                if not isinstance(error, httpx.HTTPError | ValueError | KeyError):
                    raise

    def _look(self) -> None:
        if self._now.is_set():
            raise Abandoned

    def _events(self, seen: Seen, body: dict[str, Any], key: str) -> Iterator[resuming.Event]:
        def cut(why: str) -> None:
            seen.cuts.append(time.monotonic())
            self._look()

        yield from resuming.resuming_stream(
            self.urls, "/v1/completions", body, key=key, patience_s=PATIENCE_S, retrying=cut
        )

    def _stream(self, seen: Seen, body: dict[str, Any], key: str, rng: Random) -> None:
        for event in self._events(seen, body, key):
            seen.take(event.id, event.data)
            self._look()
        seen.ended = time.monotonic()

    def _cancel(self, seen: Seen, body: dict[str, Any], key: str, rng: Random) -> None:
        """As a stream, but the client ends it after some tokens."""
        enough = rng.randint(1, 30)
        for event in self._events(seen, body, key):
            seen.take(event.id, event.data)
            self._look()
            if len(seen.events) == enough:
                self._delete(seen, rng)
        seen.ended = time.monotonic()

    def _delete(self, seen: Seen, rng: Random) -> None:
        """What is forgotten cannot be cancelled, and its stream goes on: it had ended and room was short, or the Redis
        lost its tail."""
        try:
            self._ask("DELETE", f"/v1/requests/{seen.request}", rng)
        except Refused as error:
            if error.status != 404:
                raise

    def _background(self, seen: Seen, body: dict[str, Any], key: str, rng: Random) -> None:
        """Sent, and looked after from time to time, at any gateway."""

        def send() -> None:
            answer = self._ask("POST", "/v1/completions", rng, {**body, "background": True}, {"Idempotency-Key": key})
            seen.request = json.loads(answer.content)["id"]

        send()
        self._look_after(seen, rng, missing=send)

    def _look_after(self, seen: Seen, rng: Random, missing: Callable[[], None]) -> None:
        """Ask for a request until it has ended; `missing` as in `_ask`."""
        while True:
            self._now.wait(POLL_S)
            self._look()
            answer = self._ask("GET", f"/v1/requests/{seen.request}", rng, missing=missing)
            found = answer.json()
            seen.events.append(time.monotonic())
            if found["status"] not in ("queued", "running"):
                seen.tokens, seen.text = found["token_ids"], found["text"]
                seen.finish_reason = found["finish_reason"] or ""
                seen.fingerprints = [found["system_fingerprint"] or ""]
                seen.error = str((found["error"] or {}).get("message", ""))
                seen.fallbacks = len(found.get("fallback_events") or ())
                seen.ended = time.monotonic()
                return

    def _session(self, seen: Seen, key: str, rng: Random) -> None:
        """Tensor steps one after the other; the same step again is the same step."""
        for number in range(1, len(self.asks[seen.ask].cuts) + 1):
            body = {**self.asks[seen.ask].step(number), "session_id": key}
            answer = self._ask("POST", "/v1/infer", rng, body, {"Idempotency-Key": f"{key}-{number}"}).json()
            seen.events.append(time.monotonic())
            seen.request = key
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
        """One call, at one gateway after the other until it is answered. Raises Refused.

        `missing` is called when the request is unknown: a Redis that lost its tail forgot it, and the same key brings
        it back.
        """
        gateway, end = rng.randrange(len(self.urls)), time.monotonic() + PATIENCE_S
        why: Refused = Refused(0, "no gateway answers")
        while time.monotonic() < end:
            self._look()
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
