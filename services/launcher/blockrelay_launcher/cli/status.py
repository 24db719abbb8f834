"""`blockrelay status` and `blockrelay cancel`: what a cell does, read from its Redis."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, cast

import redis
from rich.console import Console
from rich.table import Table

from blockrelay.errors import UsageError
from blockrelay.protocol.encoding.request_ids import own_id
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.plan import Plan, WorkerInfo, missing_stages, parse_split
from blockrelay.protocol.transitions import calls
from blockrelay.redis import client as redis_link
from blockrelay.redis import registry
from blockrelay.redis.cell_address import CellAddress, connected
from blockrelay_launcher.cli.trouble import read_trouble, sentences
from blockrelay_launcher.cli.worker_totals import SECONDS, SESSIONS, read_totals

#: Workers that are asked for their totals at a time.
ASKED_AT_ONCE = 32


def read_status(cell: CellAddress) -> dict[str, Any]:
    """What Redis says: in_flight, dead_letters, trouble (`read_trouble`), and per model the plan, workers, queues and
    gaps."""
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
            for route_class in ("cpu", "gpu")
        },
        "missing": missing_stages(plan, workers),
    }


def add_totals(status: dict[str, Any]) -> None:
    """Puts into each worker of `read_status` its `totals`, what it has spent its time on; None for a silent one."""
    workers = [worker for model in status["models"].values() for worker in model["workers"]]
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        for worker, totals in zip(workers, pool.map(read_totals, workers), strict=True):
            worker["totals"] = totals


def _state(worker: WorkerInfo, plan: Plan | None) -> str:
    """Its state, and of one that loads nothing yet why."""
    unplanned = worker.state == "loading" and not (plan and worker.id in plan.assignments)
    return "waiting for a stage" if unplanned else worker.state


def show(status: dict[str, Any], console: Console | None = None) -> None:
    """Print tables for people, from `read_status`, what `add_totals` has added, and `refused` (service -> cause)."""
    console = console or Console()
    if not status["models"]:
        console.print(f"cell {status['cell']}: no plan yet, no scheduler has run here")
    for model, found in status["models"].items():
        plan = found["plan"]
        table = Table("stage", "blocks", "workers", "why", title=f"plan of model {model}, epoch {plan['epoch']}")
        for index, stage in enumerate(parse_split(plan["split"])):
            count = sum(1 for s in plan["assignments"].values() if s == index)
            table.add_row(str(index), f"{stage.first}-{stage.last}", str(count), plan["reasons"][index])
        console.print(table)
        table = Table("worker", "device", "stage", "state", "requests", "pages", "last beat", title="workers")
        for w in found["workers"]:
            stage = "-" if w["stage"] is None else str(w["stage"])
            pages = f"{w['pages_used']}/{w['pages']}"
            beat = f"{w['silent_ms'] / 1000:.1f} s ago"
            table.add_row(w["id"], w["device"], stage, w["state"], str(w["running"]), pages, beat)
        console.print(table)
        if any(w.get("totals") for w in found["workers"]):
            console.print(_totals(found["workers"]))
        if any((w.get("totals") or {}).get("sessions") for w in found["workers"]):
            console.print(_sessions(found["workers"]))
        waiting = ", ".join(f"{name} {depth}" for name, depth in found["queue"].items() if depth) or "empty"
        console.print(f"queue: {waiting}")
        for gap in found["missing"]:
            console.print(f"not ready: {gap}")
    for service, cause in status.get("refused", {}).items():
        console.print(f"{service} cannot serve: {cause}", soft_wrap=True)
    for line in sentences(status["trouble"]):
        console.print(line, soft_wrap=True)
    console.print(f"in flight: {status['in_flight']}, dead letters: {status['dead_letters']}")


def _totals(workers: list[dict[str, Any]]) -> Table:
    """Since each worker began. The total has what the four others do not: choosing rows, and keeping books."""
    head = ("worker", "batches", "inference", "tokens", "transfer", "cache", "total", "prompt tokens", "tokens")
    table = Table(*head, title="what workers spent their time on, in seconds")
    for worker in workers:
        if totals := worker.get("totals"):
            seconds = [f"{totals[name]:.2f}" for name in SECONDS]
            counts = [f"{totals[name]:.0f}" for name in ("prompt_tokens", "tokens")]
            table.add_row(worker["id"], f"{totals['inferences']:.0f}", *seconds, *counts)
    return table


def _sessions(workers: list[dict[str, Any]]) -> Table:
    """Of those that serve ONNX blocks as they are, since each began."""
    head = ("worker", "made", "evicted", "clean-ups", "loading", "running", "jobs", "failed")
    table = Table(*head, title="sessions of ONNX blocks, times in seconds")
    for worker in workers:
        if told := (worker.get("totals") or {}).get("sessions"):
            texts = (f"{told[name]:.2f}" if name.endswith("_s") else f"{told[name]:.0f}" for name in SESSIONS)
            table.add_row(worker["id"], *texts)
    return table


def cancel(cell: CellAddress, request: str) -> str:
    """End a request by FINISH; says what happened. UsageError for an id that nobody knows."""
    with connected(cell) as client:
        known = client.exists(cell.keys.request(own_id(request)))  # a new cell lets no script run
        finish = calls.finish(own_id(request), "cancelled")
        verdict = redis_link.Scripts(client, cell.keys).run(finish) if known else "UNKNOWN"
    if verdict == "UNKNOWN":
        raise UsageError(f"there is no request {request}: it never existed, or its record has expired")
    return f"{request} is cancelled" if verdict == "FINISHED" else f"{request} had already ended"
