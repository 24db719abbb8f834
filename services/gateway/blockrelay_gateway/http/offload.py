"""Keeps the event loop free: work on a large body (tokenising it, above all) runs in a thread."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from fastapi import Request

P = ParamSpec("P")
T = TypeVar("T")
#: Bytes of a body from which the hop to a thread (about 0.1 ms) is the smaller evil.
LARGE_BODY = 16 << 10


def body_size(request: Request) -> int:
    """Bytes of the body; the middleware has counted them."""
    return int(request.headers["content-length"])


async def by_size(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(*args)`, in a thread when the request's body has many bytes."""
    if size < LARGE_BODY:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)
