"""Finds out if a system is ready, by asking a gateway, or on a host without one by the workers' state in Redis."""

import http.client
import json
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from blockrelay.errors import RedisTrouble
from blockrelay.host.identity import process_prefix
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.plan import WorkerInfo, slow_workers
from blockrelay.redis.client import connect
from blockrelay.redis.registry import read_workers


def why_not_ready(host: str, port: int) -> str:
    """Returns an empty text if the gateway's `/readyz` answers 200, else the reason.

    Waits for the connection and for each part of the answer for at most a second.
    """
    connection = http.client.HTTPConnection(host, port, timeout=1)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        body = answer.read(65536)
    except (OSError, http.client.HTTPException) as error:
        return f"the gateway does not answer yet ({error})"
    finally:
        connection.close()
    return "" if answer.status == 200 else _reasons(body)


def _reasons(body: bytes) -> str:
    try:
        content: Any = json.loads(body)
        return "; ".join(map(str, content["reasons"]))
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")


def why_workers_wait(redis_url: str, cell: str, model: str, stages: Mapping[int, int]) -> str:
    """Returns an empty text if all workers of these processes of this host serve, else how many do not.

    `stages` is the number of workers by pid, `model` is the model's key in Redis. If Redis does not answer, the text is
    its error.
    """
    try:
        ready = Counter(worker.pid for worker in _own_workers(redis_url, cell, model, stages) if worker.ready)
    except RedisTrouble as error:
        return str(error)
    waiting = sum(max(0, count - ready[pid]) for pid, count in stages.items())
    return f"{waiting} of {sum(stages.values())} workers have no stage yet" if waiting else ""


def why_workers_are_slow(redis_url: str, cell: str, model: str, pids: Collection[int]) -> list[str]:
    """Returns the causes of slow computing that workers of these processes report, each once; none without Redis.

    `pids` are the ids of the processes, `model` is the model's key in Redis.
    """
    try:
        return list(slow_workers(_own_workers(redis_url, cell, model, pids)))
    except RedisTrouble:
        return []


def _own_workers(redis_url: str, cell: str, model: str, pids: Collection[int]) -> list[WorkerInfo]:
    """Returns the registered workers of these processes of this host. Raises RedisTrouble."""
    with connect(redis_url, cell=cell) as client:
        workers = read_workers(client, Keys(cell), model)
    return [worker for worker in workers if worker.pid in pids and worker.id.startswith(process_prefix(worker.pid))]
