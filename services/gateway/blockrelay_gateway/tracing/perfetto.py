"""Converts spans to the trace event format, which ui.perfetto.dev and chrome://tracing open. Pure.

There are two groups of tracks: the request (its spans, and what was done for it at each moment of its runs), and a
track for each worker with its steps. Slices of a track nest or follow each other.
"""

from collections.abc import Sequence
from itertools import count
from typing import Any

from blockrelay_gateway.tracing.spans import Span, Value
from blockrelay_gateway.tracing.stages import Stages

_REQUEST, _WORKERS = 1, 2
_SPANS, _TILES = 1, 2


def trace_events(request_id: str, spans: Sequence[Span], stages: Stages) -> dict[str, Any]:
    """Returns the trace as an object for JSON. Times are Unix microseconds.

    `request_id` is the request id that is shown, `spans` are those of `request_spans`, `stages` those of `stages_of`.
    """
    events = [
        _named("process", _REQUEST, 0, f"request {request_id}"),
        _named("thread", _REQUEST, _SPANS, "queue and runs"),
        _named("process", _WORKERS, 0, "workers"),
    ]
    numbers = count(1)
    for span in spans:
        name = f"run {next(numbers)}" if span.name == "run" else span.name
        args = {**span.attributes, **({"error.type": span.error} if span.error else {})}
        events.append(_slice(_REQUEST, _SPANS, name, span.start_us, span.end_us, args))
        events += [_instant(event.name, event.at_us, event.attributes) for event in span.events]
        if reason := span.attributes.get("blockrelay.rerun.reason"):
            events.append(_instant(f"runs again: {reason}", span.end_us, {}))
    if stages.tiles:
        events.append(_named("thread", _REQUEST, _TILES, "where it was"))
    for tile in stages.tiles:
        who: dict[str, Value] = {"workers": ", ".join(tile.workers)}
        events.append(_slice(_REQUEST, _TILES, tile.doing, tile.start_us, tile.end_us, who))
    tracks = {worker: tid for tid, worker in enumerate(sorted({_worker(span) for span in stages.spans}), 1)}
    for (stage, worker_id, blocks), tid in tracks.items():
        events.append(_named("thread", _WORKERS, tid, f"stage {stage}, blocks {blocks}: {worker_id}"))
    for span in stages.spans:
        kind = str(span.attributes["blockrelay.kind"])
        events.append(_slice(_WORKERS, tracks[_worker(span)], kind, span.start_us, span.end_us, span.attributes))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _worker(span: Span) -> tuple[int, str, str]:
    """Stage, worker id and blocks of a step's span: one track of the trace."""
    values = span.attributes
    return int(str(values["blockrelay.stage"])), str(values["blockrelay.worker"]), str(values["blockrelay.blocks"])


def _slice(pid: int, tid: int, name: str, start_us: int, end_us: int, args: dict[str, Value]) -> dict[str, Any]:
    where = {"ph": "X", "pid": pid, "tid": tid, "cat": "blockrelay"}
    return {**where, "name": name, "ts": start_us, "dur": end_us - start_us, "args": args}


def _instant(name: str, at_us: int, args: dict[str, Value]) -> dict[str, Any]:
    where = {"ph": "i", "s": "t", "pid": _REQUEST, "tid": _SPANS, "cat": "blockrelay"}
    return {**where, "name": name, "ts": at_us, "args": args}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}
