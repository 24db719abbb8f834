"""Work in a thread beside a test."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from socketserver import BaseServer


@contextmanager
def beside(work: Callable[[threading.Event], object]) -> Iterator[None]:
    """`work` runs until the block is over, which its event tells it. What it raises is raised here."""
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work, over)
        try:
            yield
        finally:
            over.set()
    working.result()


@contextmanager
def serving(server: BaseServer) -> Iterator[None]:
    """The server answers meanwhile, and is closed behind."""
    with server, ThreadPoolExecutor(1) as pool:
        pool.submit(server.serve_forever, 0.01)
        try:
            yield
        finally:
            server.shutdown()
