"""Reads the registry records of workers."""

from typing import Any

from blockrelay_worker.transport.redis_links import Links


def read_fields(links: Links, worker_id: str, names: tuple[str, ...]) -> list[bytes | None]:
    """Returns fields of a worker's record by name; None for each that is missing.

    Waits for Redis; raises Stopping when the process should end meanwhile.
    """
    record = links.keys.worker(worker_id)
    fields: Any = links.retry_until_reachable(lambda: links.control.hmget(record, list(names)), "read worker")
    return fields
