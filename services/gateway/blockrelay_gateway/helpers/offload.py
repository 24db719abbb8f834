"""Keeps the event loop free: work on large bodies and answers runs in a thread."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
#: Bytes from which the hop to a thread (about 0.1 ms) is the smaller evil.
LARGE = 16 << 10


async def by_size(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(*args)`, in a thread where `size`, the bytes that it works on, is large."""
    if size < LARGE:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)
