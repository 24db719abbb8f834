"""Runs work on large bodies and answers in a thread, to keep the event loop free."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from blockrelay_gateway.policy import OFFLOAD_BYTES

P = ParamSpec("P")
T = TypeVar("T")


async def by_size(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns `work(*args, **kwargs)`, run in a thread if `size` is at least OFFLOAD_BYTES; raises what it raises."""
    if size < OFFLOAD_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)
