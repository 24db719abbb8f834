"""One JSON object a line on stderr: timestamp, level, event_type, node_id, request_id, session_id, step, traceparent,
trace_id (of a request whose client sent a traceparent), data.

`log.info("NODE_READY", blocks=9)` puts `blocks` under `data`; `request_id`, `session_id` and `step` stay on top.
Prompts and texts are never logged unless `log_prompts` is set: callers pass counts, not contents.
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
    """Default node id: role, host and process."""
    return f"{role}-{socket.gethostname()}-{os.getpid()}"


def configure(level: str, *, node_id: str) -> None:
    """Call once per process, in `__main__`."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _shape,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Patient(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(node_id=node_id)
    _NODE["id"] = node_id
    logging.basicConfig(handlers=[_Forward()], level=level, force=True)


class _Patient:
    """A stream that loses lines where they cannot be written: a full disk must not end what is being told about."""

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
    """What libraries and stdlib loggers say, in the same format."""

    def emit(self, record: logging.LogRecord) -> None:
        get().log(record.levelno, "LOG", logger=record.name, message=record.getMessage())


_NODE: dict[str, str] = {}


def get() -> FilteringBoundLogger:
    """A logger that knows its node (context variables do not reach other threads, so it is bound here)."""
    return cast(FilteringBoundLogger, structlog.get_logger(node_id=_NODE.get("id", "unconfigured")))
