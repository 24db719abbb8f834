"""What workers say of themselves in the registry."""

from typing import Any

from blockrelay_worker.transport.redis_links import Links


def read_fields(links: Links, worker: str, names: tuple[str, ...]) -> list[bytes | None]:
    """Fields of a worker's record, None for those that it has not.

    Waits for Redis; raises Stopping when the process should end meanwhile.
    """
    record = links.keys.worker(worker)
    fields: Any = links.retry_until_reachable(lambda: links.control.hmget(record, list(names)), "read worker")
    return fields
