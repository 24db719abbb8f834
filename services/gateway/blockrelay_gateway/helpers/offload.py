"""Runs work on large bodies and answers in a thread, to keep the event loop free."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
#: Bytes from which on the work costs more than the hop to a thread (about 0.1 ms).
LARGE = 16 << 10


async def by_size(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns `work(*args)`, which runs in a thread if it works on `size` bytes of LARGE or more."""
    if size < LARGE:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)
