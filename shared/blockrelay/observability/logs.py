"""Structured logs: one JSON object per line on stderr.

The fields are timestamp, level, event_type, node_id, request_id, session_id, step, traceparent, trace_id and data; the
trace id is in lines about a request whose client sent a traceparent. `log.info("NODE_READY", blocks=9)` puts `blocks`
under `data`; `request_id`, `session_id` and `step` stay on top. Callers pass counts, not contents: only a gateway with
the setting BLOCKRELAY_LOG_PROMPTS logs prompts, as token ids.
"""

import contextlib
import logging
import os
import socket
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO, cast

import structlog
from structlog.typing import FilteringBoundLogger

from blockrelay.observability.traceparent import trace_and_parent

_TOP = ("node_id", "request_id", "session_id", "step", "traceparent")


def _shape(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Sorts the fields of an event into those on top and those under `data`. A processor of structlog."""
    shaped: dict[str, Any] = {
        "timestamp": event.pop("timestamp"),
        "level": cast(str, event.pop("level")).upper(),
        "event_type": event.pop("event"),
    }
    for name in _TOP:
        value = event.pop(name, None)
        if value is not None:
            shaped[name] = value
    if "traceparent" in shaped:
        shaped["trace_id"], _ = trace_and_parent(shaped["traceparent"])
    shaped["data"] = dict(event)
    return shaped


def node_name(role: str) -> str:
    """Returns the default node id of this process: `role`, host name and process id."""
    return f"{role}-{socket.gethostname()}-{os.getpid()}"


def configure(level: str, *, node_id: str) -> None:
    """Sets up logging for this process, from `level` up (a level name such as INFO). Called once, in `__main__`.

    `node_id` goes into every line. Raises KeyError for an unknown level.
    """
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _shape,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _LossyStream(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    _NODE["id"] = node_id
    logging.basicConfig(handlers=[_Forward()], level=level, force=True)


class _LossyStream:
    """A text stream that drops what cannot be written: a full disk must not end the process that logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


class _Forward(logging.Handler):
    """A handler of the standard library's `logging` that writes its records in our format, as event LOG."""

    def emit(self, record: logging.LogRecord) -> None:
        get().log(record.levelno, "LOG", logger=record.name, message=record.getMessage())


_NODE: dict[str, str] = {}


def get() -> FilteringBoundLogger:
    """Returns a logger bound to this process's node id, for any thread.

    The id is bound here because context variables do not reach other threads.
    """
    return cast(FilteringBoundLogger, structlog.get_logger(node_id=_NODE.get("id", "unconfigured")))
