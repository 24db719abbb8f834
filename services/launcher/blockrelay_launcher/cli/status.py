"""The commands `blockrelay status` and `blockrelay cancel`: read a cell's state from its Redis, and end a request."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, cast

import redis
from rich.console import Console

from blockrelay.errors import UsageError
from blockrelay.protocol.encoding.request_ids import own_id
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.plan import DEVICES, Plan, WorkerInfo, missing_stages, parse_split
from blockrelay.protocol.transitions import calls
from blockrelay.redis import client as redis_link
from blockrelay.redis import registry
from blockrelay.redis.cell_address import CellAddress, connected
from blockrelay_launcher.cli.trouble import read_trouble, sentences
from blockrelay_launcher.cli.worker_totals import SESSIONS, TOTALS, read_totals
from blockrelay_launcher.policy import ASKED_AT_ONCE
from blockrelay_launcher.tables import print_table

#: Headings of the table of workers.
WORKER = ("worker", "device", "stage", "state", "precision", "requests", "pages", "heartbeat")
#: Headings of the counts in TOTALS. The total also has the choice of tokens for a step and the accounting, which no
#: other column has.
TOTALS_HEAD = ("worker", "batches", "inference", "tokens", "transfer", "cache", "total", "prompt tokens", "new tokens")
#: Headings of the counts in SESSIONS.
SESSIONS_HEAD = ("worker", "made", "evicted", "clean-ups", "loading", "running", "jobs", "failed")


def read_status(cell: CellAddress) -> dict[str, Any]:
    """Reads a cell's state from its Redis, as the JSON object of `status --json`.

    It has `cell` (the name), `in_flight`, `dead_letters`, `trouble` (the result of `read_trouble`), and `models`. This
    has, by the key of each model with a plan, the `plan`, `workers`, `queue` (depths by name) and `missing` (a sentence
    for each stage without a worker). Raises ServiceUnavailable if Redis does not answer, UsageError if the cell speaks
    another protocol.
    """
    keys = cell.keys
    with connected(cell) as client:
        prefix = keys.plan("")
        models = sorted(cast(bytes, k).decode()[len(prefix) :] for k in client.scan_iter(f"{prefix}*", count=1000))
        workers = {model: registry.read_workers(client, keys, model) for model in models}
        return {
            "cell": cell.settings.cell,
            "in_flight": client.zcard(keys.running),
            "dead_letters": client.xlen(keys.dead_letters),
            "trouble": read_trouble(client, keys, workers),
            "models": {model: _read_model(client, keys, model, workers[model]) for model in models},
        }


def _read_model(client: redis.Redis, keys: Keys, model: str, workers: list[WorkerInfo]) -> dict[str, Any]:
    plan = registry.read_plan(client, keys, model)
    return {
        "plan": plan and asdict(plan),
        "workers": [{**asdict(w), "state": _state(w, plan)} for w in workers],
        "queue": {
            f"{name}:{route_class}": length(key(model, route_class))
            for name, key, length in (("jobs", keys.queue, client.zcard), ("reruns", keys.reruns, client.xlen))
            for route_class in DEVICES
        },
        "missing": missing_stages(plan, workers),
    }


def add_totals(status: dict[str, Any]) -> None:
    """Adds to each worker of `read_status` its `totals` (`read_totals`); None for a worker that does not answer."""
    workers = [worker for model in status["models"].values() for worker in model["workers"]]
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        for worker, totals in zip(workers, pool.map(read_totals, workers), strict=True):
            worker["totals"] = totals


def _state(worker: WorkerInfo, plan: Plan | None) -> str:
    """Returns the state of a worker for people; a worker without a stage is not "loading"."""
    unplanned = worker.state == "loading" and not (plan and worker.id in plan.assignments)
    return "waiting for a stage" if unplanned else worker.state


def show(status: dict[str, Any], console: Console | None = None) -> None:
    """Prints the result of `read_status` and `add_totals` as tables.

    `status["refused"]`, if present, has the cause for each service that cannot serve.
    """
    console = console or Console()
    if not status["models"]:
        console.print(f"cell {status['cell']}: no plan yet, no scheduler has run here")
    for model, facts in status["models"].items():
        plan = facts["plan"]
        title = f"plan of model {model}, epoch {plan['epoch']}"
        print_table(console, title, ("stage", "blocks", "workers", "why"), _stages(plan), folds="why")
        print_table(console, "workers", WORKER, [_worker(one) for one in facts["workers"]])
        totals = {worker["id"]: worker.get("totals") or {} for worker in facts["workers"]}
        _show_counts(console, "what workers spent their time on, in seconds", TOTALS_HEAD, TOTALS, totals)
        sessions = {name: counts.get("sessions") or {} for name, counts in totals.items()}
        _show_counts(console, "sessions of ONNX blocks, times in seconds", SESSIONS_HEAD, SESSIONS, sessions)
        waiting = ", ".join(f"{name} {depth}" for name, depth in facts["queue"].items() if depth) or "empty"
        console.print(f"queue: {waiting}")
        for gap in facts["missing"]:
            console.print(f"not ready: {gap}")
    for service, cause in status.get("refused", {}).items():
        console.print(f"{service} cannot serve: {cause}", soft_wrap=True)
    for line in sentences(status["trouble"]):
        console.print(line, soft_wrap=True)
    console.print(f"in flight: {status['in_flight']}, dead letters: {status['dead_letters']}")


def _stages(plan: dict[str, Any]) -> list[tuple[str, ...]]:
    assigned = list(plan["assignments"].values())
    return [
        (str(index), f"{stage.first}-{stage.last}", str(assigned.count(index)), plan["reasons"][index])
        for index, stage in enumerate(parse_split(plan["split"]))
    ]


def _worker(one: dict[str, Any]) -> tuple[str, ...]:
    stage = "-" if one["stage"] is None else str(one["stage"])
    pages, heartbeat = f"{one['pages_used']}/{one['pages']}", f"{one['silent_ms'] / 1000:.1f} s ago"
    precision = next((it["precision"] for it in one["folders"] if it["key"] == one["folder"]), "-")
    return one["id"], one["device"], stage, one["state"], precision, str(one["running"]), pages, heartbeat


def _show_counts(
    console: Console,
    title: str,
    head: Sequence[str],
    names: Iterable[str],
    by_worker: Mapping[str, Mapping[str, float]],
) -> None:
    """Prints what each worker has counted since it started; seconds are the names that end with `_s`."""
    rows = [
        (worker, *(f"{counts[name]:.2f}" if name.endswith("_s") else f"{counts[name]:.0f}" for name in names))
        for worker, counts in by_worker.items()
        if counts
    ]
    if rows:
        print_table(console, title, head, rows)


def cancel(cell: CellAddress, request_id: str) -> str:
    """Cancels a request with the script FINISH and returns a sentence on the outcome.

    `request_id` is the id as clients see it, or the one inside the cell. Raises UsageError for an unknown id and for a
    cell that speaks another protocol, ServiceUnavailable if Redis does not answer.
    """
    with connected(cell) as client:
        known = client.exists(cell.keys.request(own_id(request_id)))  # a new cell lets no script run
        finish = calls.finish(own_id(request_id), "cancelled")
        verdict = redis_link.Scripts(client, cell.keys).run(finish) if known else "UNKNOWN"
    if verdict == "UNKNOWN":
        raise UsageError(f"there is no request {request_id}: it never existed, or its record has expired")
    return f"{request_id} is cancelled" if verdict == "FINISHED" else f"{request_id} had already ended"
