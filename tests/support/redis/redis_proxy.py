"""A TCP proxy in front of a Redis that a test can slow down, cut, let lose replies, or let answer with an error."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import hiredis

from tests.support.redis.redis_server import RedisServer
from tests.support.waiting import wait_until

State = Literal["open", "cut", "black hole", "answering"]


@dataclass(eq=False)
class _Connection:
    """One client. `left` bytes of reply may still pass, None: all."""

    writers: list[asyncio.StreamWriter]
    left: int | None = None
    last: bool = False  # afterwards all are cut
    commands: hiredis.Reader = field(default_factory=hiredis.Reader)


@dataclass(frozen=True, slots=True)
class _Loss:
    """The next reply to a command that contains `needle` ends after `size` bytes, and so does its connection. What is
    sent from `rest` on does not reach the server."""

    needle: bytes
    size: int
    rest: bytes = b""


@dataclass(frozen=True, slots=True)
class _Turn:
    """From the next command that contains `needle` on the proxy is in `state`; that one runs before, or not at all."""

    needle: bytes
    state: State
    runs: bool


@dataclass
class RedisProxy:
    """Listens on a port of its own, `url`. All methods may be called from any thread."""

    upstream: str
    port: int = 0
    delay_s: float = 0.0  # added to every piece, in both directions
    lost_replies: int = 0
    swallowed: int = 0  # bytes that went into the black hole
    answered: int = 0  # commands that got `line` as their answer
    seen: int = 0  # commands, whatever became of them
    line: bytes = b""
    _state: State = "open"
    _losses: list[_Loss] = field(default_factory=list[_Loss])
    _turn: _Turn | None = None
    _connections: set[_Connection] = field(default_factory=set[_Connection])
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def cut(self) -> None:
        """Every connection is reset, and every new one."""
        self._run(self._set("cut"))

    def black_hole(self) -> None:
        """Connections stay, new ones are accepted, and nothing that is sent arrives. Nobody is told."""
        self._run(self._set("black hole"))

    def answer(self, line: bytes) -> None:
        """Every command gets this line as its answer and does not reach the server."""
        self.line = line
        self._run(self._set("answering"))

    def heal(self) -> None:
        """As it was. What did not reach the server is gone: its connections are reset."""
        self._run(self._set("open"))

    def lose_reply(self, needle: bytes, *, after_bytes: int = 0) -> None:
        """Once: a command that contains `needle` runs, and its reply is cut off with its connection."""
        self._losses.append(_Loss(needle, after_bytes))

    def cut_between(self, command: bytes) -> None:
        """Once: what is sent in front of a `command` with four letters, in one piece with it, runs; the command does
        not, and the connection is cut before anything is answered."""
        head = b"$4\r\n" + command + b"\r\n"
        self._losses.append(_Loss(head, 0, rest=head))

    def cut_at(self, needle: bytes, *, runs: bool) -> None:
        """As `cut`, from the next command that contains `needle` on; whether it still runs, its reply is lost."""
        self._turn = _Turn(needle, "cut", runs)

    def answer_at(self, needle: bytes, line: bytes) -> None:
        """As `answer`, from the next command that contains `needle` on."""
        self.line = line
        self._turn = _Turn(needle, "answering", runs=False)

    # --- on the loop's thread ---

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _set(self, state: State) -> None:
        reset = state == "cut" or (self._state in ("black hole", "answering") and state == "open")
        self._state = state
        if reset:
            for connection in list(self._connections):
                _reset(connection)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        connection = _Connection([writer])
        self._connections.add(connection)
        try:
            if self._state == "cut":
                return
            with contextlib.suppress(OSError):
                up_reader, up_writer = await asyncio.open_unix_connection(self.upstream)
                connection.writers.append(up_writer)
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._pump(reader, up_writer, connection, self._watch))
                    both.create_task(self._pump(up_reader, writer, connection, self._clip))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            _reset(connection)
            self._connections.discard(connection)
            self._tasks.discard(task)

    async def _pump(
        self,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        connection: _Connection,
        change: Callable[[bytes, _Connection], bytes],
    ) -> None:
        while data := await source.read(1 << 16):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if self._state == "black hole":
                self.swallowed += len(data)
                continue
            target.write(change(data, connection))
            await target.drain()
            if connection.left == 0 and change == self._clip:
                self.lost_replies += 1
                if connection.last:
                    await self._set("cut")
                break
        _reset(connection)

    def _watch(self, data: bytes, connection: _Connection) -> bytes:
        connection.commands.feed(data)
        count = 0
        while connection.commands.gets() is not False:
            count += 1
        self.seen += count
        if (turn := self._turn) and turn.needle in data:
            self._turn = None
            if turn.runs:
                connection.left, connection.last = 0, True
                return data
            self._state = turn.state
            if turn.state == "cut":
                for one in list(self._connections):
                    _reset(one)
                return b""
        if self._state == "answering":
            self.answered += count
            connection.writers[0].write(self.line * count)
            return b""
        for loss in list(self._losses):
            if loss.needle in data:
                self._losses.remove(loss)
                connection.left = loss.size
                if loss.rest:
                    return data[: data.rindex(b"*", 0, data.index(loss.rest))]
                break
        return data

    def _clip(self, data: bytes, connection: _Connection) -> bytes:
        if connection.left is None:
            return data
        passed, connection.left = data[: connection.left], max(0, connection.left - len(data))
        return passed

    async def _serve(self, started: threading.Event) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        async with server:
            await server.serve_forever()


def _reset(connection: _Connection) -> None:
    for writer in connection.writers:
        writer.transport.abort()


@contextmanager
def proxied(server: RedisServer) -> Iterator[RedisProxy]:
    """A proxy in front of `server`, open."""
    proxy, started = RedisProxy(str(server.socket)), threading.Event()
    loop = proxy._loop  # pyright: ignore[reportPrivateUsage]
    main = loop.create_task(proxy._serve(started))  # pyright: ignore[reportPrivateUsage]

    async def end() -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(main)
        loop.run_until_complete(end())
        loop.close()

    thread = threading.Thread(target=run, name="redis proxy", daemon=True)
    thread.start()
    wait_until(started.is_set, "the proxy listens")
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(main.cancel)
        thread.join(10)
