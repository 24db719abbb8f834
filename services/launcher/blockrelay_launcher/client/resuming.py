"""A client that resumes its stream when a gateway dies. It needs only httpx: copy it.

A request carries an Idempotency-Key. After an error the client sends the same POST to the next gateway, with the id of
the last event. That gateway starts the request if none has accepted it, else attaches to it, and sends the events that
follow.
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

#: HTTP statuses after which the next gateway is tried.
TRY_AGAIN = (429, 502, 503)


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One server-sent event of an answer."""

    id: str
    """Id of the event, unique in the system: `<request>:<position>`.

    It is empty for an error with which a gateway ends the stream early.
    """
    data: dict[str, Any]
    """The JSON object of the event."""


class Refused(Exception):
    """The request will not be answered.

    `status` is the HTTP status of the last answer (0: none came; 200: its stream was cut). `error` is the text of the
    gateway, or the cause of the last interruption.
    """

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
    accepted: Callable[[str], None] = lambda request_id: None,
    http: httpx.Client | None = None,
) -> Generator[StreamEvent, None, None]:
    """Yields every event of the answer once, in order. The last one may have "error", if the request failed.

    The POST goes to `path` of one of `gateways` (base URLs, at least one), the first one drawn at random. `body` is
    the request without `stream`, `key` its Idempotency-Key (None: a random one), and `headers` are further headers.

    `retrying` is called with the cause after every try that failed or was cut, `accepted` with the request's id
    whenever a gateway begins to answer. `http` is the client to use; None makes one for this call, which obeys
    HTTP_PROXY and the like, unless all gateways are on this machine. Raises Refused at once for any status but 200 and
    those in TRY_AGAIN. Raises it also after `patience_s` seconds without an event; this is checked before each try, not
    within a stream.
    """
    request_headers = {"Idempotency-Key": key or str(uuid.uuid4()), **(headers or {})}
    gateway = random.randrange(len(gateways))
    last_event_at, failures, status, why = time.monotonic(), 0, 0, "no gateway answers"
    with contextlib.ExitStack() as held:
        if http is None:
            trust_env = not all(map(is_on_this_machine, gateways))
            http = held.enter_context(httpx.Client(timeout=httpx.Timeout(30.0, connect=2.0), trust_env=trust_env))
        while time.monotonic() - last_event_at < patience_s:
            wait = 0.0 if failures == 0 else random.uniform(0.5, 1.0) * min(2.0, 0.05 * 2**failures)
            try:
                url = gateways[gateway % len(gateways)] + path
                with http.stream("POST", url, json={**body, "stream": True}, headers=request_headers) as answer:
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
                            if not event.id:  # this gateway is shutting down
                                why = str(event.data)
                                break
                            request_headers["Last-Event-ID"] = event.id
                            last_event_at, failures = time.monotonic(), 0
                            yield event
            except httpx.TransportError as error:
                why = repr(error)
            retrying(why)
            time.sleep(wait)
            gateway, failures = gateway + 1, failures + 1
    raise Refused(status, why)


def is_on_this_machine(url: str) -> bool:
    """True if the host of a URL is a loopback address or localhost."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_events(parts: Iterable[bytes]) -> Iterator[StreamEvent | None]:
    """Yields the complete events of a stream, and None for [DONE]. An event that was cut off is dropped."""
    rest = b""
    for part in parts:
        *blocks, rest = (rest + part).split(b"\n\n")
        for block in blocks:
            fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if b": " in line[1:])
            if b"data" in fields:
                done = fields[b"data"] == b"[DONE]"
                yield None if done else StreamEvent(fields.get(b"id", b"").decode(), json.loads(fields[b"data"]))
