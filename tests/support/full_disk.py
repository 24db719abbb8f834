"""A disk that has no room for what this process writes."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_room(size: int) -> Iterator[None]:
    """Files of this process cannot grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
