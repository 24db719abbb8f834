"""A client that survives our gateways: it needs httpx alone, copy it.

A request is sent with an Idempotency-Key. When anything goes wrong, the same POST goes to the next gateway, with the id
of the last event: it begins the request if nobody has accepted it, attaches to it otherwise, and sends what follows.
"""

import contextlib
import ipaddress
import json
import random
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

TRY_AGAIN = (429, 502, 503)


@dataclass(frozen=True, slots=True)
class Event:
    """`id` names the event in the whole system: `<request>:<position>`."""

    id: str
    data: dict[str, Any]


class Refused(Exception):
    """The request will not be answered: HTTP's `status`, and `error` as the gateway (or the connection) said it."""

    def __init__(self, status: int, error: Any) -> None:
        super().__init__(f"{status}: {error}")
        self.status, self.error = status, error


def resuming_stream(
    gateways: Sequence[str],
    path: str,
    body: Mapping[str, Any],
    *,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    patience_s: float = 300.0,
    retrying: Callable[[str], None] = lambda why: None,
    accepted: Callable[[str], None] = lambda request: None,
    http: httpx.Client | None = None,
) -> Generator[Event, None, None]:
    """Every event of the answer, in order, once; the last one may hold "error": how the request ended.

    `retrying` hears of every interruption; `accepted` hears the id of the request whenever a gateway begins to answer.
    `http` is a client to use, else there is one for this call: it obeys HTTP_PROXY and the like, unless all gateways
    are on this machine. Raises Refused after `patience_s` seconds without an event, and at once when a gateway says
    that trying again is of no use (400, 401, 422, ...).
    """
    sent = {"Idempotency-Key": key or str(uuid.uuid4()), **(headers or {})}
    gateway = random.randrange(len(gateways))
    heard, failures, status, why = time.monotonic(), 0, 0, "no gateway answers"
    with contextlib.ExitStack() as held:
        if http is None:
            trust_env = not all(map(is_on_this_machine, gateways))
            http = held.enter_context(httpx.Client(timeout=httpx.Timeout(30.0, connect=2.0), trust_env=trust_env))
        while time.monotonic() - heard < patience_s:
            wait = 0.0 if failures == 0 else random.uniform(0.5, 1.0) * min(2.0, 0.05 * 2**failures)
            try:
                url = gateways[gateway % len(gateways)] + path
                with http.stream("POST", url, json={**body, "stream": True}, headers=sent) as answer:
                    if (status := answer.status_code) != 200:
                        why = answer.read().decode(errors="replace")
                        if status not in TRY_AGAIN:
                            raise Refused(status, why)
                        wait = max(wait, float(answer.headers.get("retry-after", 0)))
                    else:
                        accepted(answer.headers.get("x-request-id", ""))
                        why = "the stream was cut"
                        for event in read_events(answer.iter_bytes()):
                            if event is None:
                                return
                            if not event.id:  # this gateway shuts down
                                why = str(event.data)
                                break
                            sent["Last-Event-ID"], heard, failures = event.id, time.monotonic(), 0
                            yield event
            except httpx.TransportError as error:
                why = repr(error)
            retrying(why)
            time.sleep(wait)
            gateway, failures = gateway + 1, failures + 1
    raise Refused(status, why)


def is_on_this_machine(url: str) -> bool:
    """Whether the host of a URL is a loopback address or localhost."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_events(parts: Iterable[bytes]) -> Iterator[Event | None]:
    """Complete events of a stream, None for [DONE]. What was cut off in the middle is not an event."""
    rest = b""
    for part in parts:
        *blocks, rest = (rest + part).split(b"\n\n")
        for block in blocks:
            fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if b": " in line[1:])
            if b"data" in fields:
                done = fields[b"data"] == b"[DONE]"
                yield None if done else Event(fields.get(b"id", b"").decode(), json.loads(fields[b"data"]))
