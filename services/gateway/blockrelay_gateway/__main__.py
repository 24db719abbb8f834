"""The program `python -m blockrelay_gateway`: one process with one event loop; settings are options or BLOCKRELAY_*.

After SIGTERM it answers the requests that it has accepted, after SIGINT (Ctrl-C) it tells clients at once how to go on,
and after a second signal it waits for nothing. Exit codes: 0 after a signal, 2 if it cannot start (one line says why),
1 if the server's startup failed, 70 if it failed in a way that another start may not meet.
"""

import asyncio
import contextlib
import gc
import logging
import math
import resource
import signal
import socket
import sys
from types import FrameType

import uvicorn
from fastapi import FastAPI

from blockrelay import failpoints
from blockrelay.auth.api_keys import is_open_to_others
from blockrelay.cell_list import cells_of
from blockrelay.errors import BlockrelayError, RedisTrouble, UsageError
from blockrelay.exit_codes import BROKEN, UNUSABLE, complain, exit_code
from blockrelay.observability import logs
from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import check_redis, connect, wait_for_redis
from blockrelay.redis.errors import RedisWatch
from blockrelay.settings import GatewaySettings, read_settings
from blockrelay_gateway.api.operations.scrape import metrics_port
from blockrelay_gateway.api.state import Gateway
from blockrelay_gateway.app import create_app
from blockrelay_gateway.draining.course import Course, Phase, course_from
from blockrelay_gateway.http.server import accept_the_last, server_config
from blockrelay_gateway.policy import LAST_EVENT_S


class GatewayServer(uvicorn.Server):
    """The HTTP server of a gateway: after a signal it follows `draining.course`.

    It also ends when the gateway's background work fails: a gateway without it must not look alive.
    """

    _loop: asyncio.AbstractEventLoop

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._course: Course | None = None
        self._alarm: asyncio.TimerHandle | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves at the listening `sockets` until the gateway has ended, by a signal or by failed background work."""
        self._loop = asyncio.get_running_loop()
        watching = asyncio.create_task(self._end_when_broken())
        try:
            await super().serve(sockets)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts the connections that still wait at `sockets`, then shuts down as uvicorn does."""
        await accept_the_last(sockets or [])
        await super().shutdown(sockets)

    async def _end_when_broken(self) -> None:
        await self._gateway.cells.broken.wait()
        self._end(None)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal, which may come in the middle of anything, so the event loop does everything else.

        It may be called only after `serve` has begun.
        """
        self._captured_signals.append(sig)
        self._loop.call_soon_threadsafe(self._end, sig)

    def _end(self, number: int | None) -> None:
        settings, first = self._gateway.settings, self._course is None
        self._course = course_from(
            number,
            self._loop.time(),
            linger_s=settings.gateway_linger_s,
            drain_s=settings.gateway_drain_s,
            started=self.started,
            under_way=self._course,
        )
        if first:
            signal_name = signal.Signals(number).name if number else ""
            logs.get().info("NODE_DRAINING", signal=signal_name, connections=len(self.server_state.connections))
        self._follow(self._course)

    def _follow(self, course: Course) -> None:
        """Enters the current phase of `course`, and sets an alarm for the next one."""
        if self._alarm is not None:
            self._alarm.cancel()
        now = self._loop.time()
        phase = course.phase(now)
        if phase >= Phase.CUTTING and self._gateway.drain.phase < Phase.CUTTING:
            logs.get().info("DRAIN_OVER", under_way=len(self.server_state.tasks))
        self._gateway.enter(phase)
        if phase >= Phase.FINISHING and not self.should_exit:
            # Behind it uvicorn cancels what is left. It reads this when it sees that it should exit.
            self.config.timeout_graceful_shutdown = math.ceil(course.gone - now) + 1
            self.should_exit = True
        if phase == Phase.GONE:
            self._loop.call_later(LAST_EVENT_S, self._leave_at_once)
        if (change := course.next_change(now)) is not None:
            self._alarm = self._loop.call_at(change, self._follow, course)

    def _leave_at_once(self) -> None:
        """Aborts all connections: one that stays open would keep the server from ending."""
        self.force_exit = len(self._captured_signals) > 1
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class _JsonLog(logging.Handler):
    """A log handler that writes uvicorn's own messages as the gateway's log lines."""

    def emit(self, record: logging.LogRecord) -> None:
        detail = {"exc_info": record.exc_info} if record.exc_info else {}
        # It says so of every handshake that is refused, too.
        level = logging.DEBUG if "without completing handshake" in record.getMessage() else record.levelno
        logs.get().log(level, "SERVER_MESSAGE", message=record.getMessage(), **detail)


def main() -> int:
    """Runs a gateway with the settings of command line and environment; returns the exit code when it has ended.

    After a signal uvicorn raises it once more, for the handlers that were in force before: they decide how it ends.
    """
    try:
        settings = read_settings(GatewaySettings, sys.argv[1:], program="python -m blockrelay_gateway")
    except UsageError as error:
        return _refuse(str(error))
    logs.configure(settings.log_level, node_id=settings.node_id or logs.node_name("gateway"))
    failpoints.arm("gateway", settings.failpoint)
    with tcp_socket(settings.host) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
            listener.listen()
        except OSError as error:
            return _refuse(f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}")
        try:
            app = create_app(settings)
            look_at_redis(settings)
            metrics = metrics_port(settings, app.state.scrape)
        except BlockrelayError as error:
            return _refuse(str(error), exit_code(error))
        try:
            return _serve(app, settings, listener)
        finally:
            if metrics is not None:
                metrics.close()


def look_at_redis(settings: GatewaySettings) -> None:
    """Checks the Redis servers of all cells and joins the cells, before the gateway serves.

    Raises UsageError for an unusable file of cells, for a Redis that can never serve the gateway as it is set up, and
    for a cell whose protocol this release does not speak. A Redis that does not answer is waited for later. A Redis
    that refuses the password of a file is waited for here, for LET_IN_S (`blockrelay.redis.client`) at most; then it
    raises UsageError, too. SIGTERM ends the process meanwhile, so only the main thread may call it.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        for name, place in cells_of(settings).places.items():
            _look_at(place.redis_url, name, "control Redis", join=Keys(name))
            if place.payload_redis_url:
                _look_at(place.payload_redis_url, name, "payload Redis", join=None)
    finally:
        signal.signal(signal.SIGTERM, before)


def _look_at(url: str, cell: str, name: str, *, join: Keys | None) -> None:
    """Checks one Redis and joins the cell `join`, if it is given; waits while a password in a file is refused."""
    watch = RedisWatch(cell=cell)
    with connect(url, cell=cell) as client:

        def look() -> None:
            with contextlib.suppress(RedisTrouble):
                check_redis(client, name, cell=join)

        wait_for_redis(look, lambda error: watch.failed("start", error))
        watch.worked("start")


def allow_files(wanted: int) -> None:
    """Raises the limit of open files to `wanted`, or as far as allowed: a lost Redis connection needs a new file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def tcp_socket(host: str) -> socket.socket:
    """Returns a socket for `host` with the protocol TCP: asyncio sets TCP_NODELAY only on such sockets.

    Without it the first event of every answer waits for the client's delayed acknowledgement of the headers, 40 ms.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)


def _serve(app: FastAPI, settings: GatewaySettings, listener: socket.socket) -> int:
    uvicorn_log = logging.getLogger("uvicorn")
    uvicorn_log.handlers, uvicorn_log.propagate = [_JsonLog()], False
    uvicorn_log.setLevel(logging.WARNING)
    if settings.api_keys is None and is_open_to_others(settings.host):
        logs.get().warning(
            "GATEWAY_OPEN", host=settings.host, advice="everybody who reaches it may use it; set BLOCKRELAY_API_KEYS"
        )
    allow_files(2 * settings.max_connections + 256)
    logs.get().info("NODE_STARTING", host=settings.host, port=listener.getsockname()[1])
    gc.collect()
    gc.freeze()  # the modules stay: a look at all of them would hold up every stream
    gateway: Gateway = app.state.gateway
    server = GatewayServer(server_config(app, settings, gateway.bodies, gateway.drain), gateway)
    server.run(sockets=[listener])
    if gateway.cells.broken.is_set():
        return BROKEN
    return 0 if server.started else 1


def _refuse(reason: str, code: int = UNUSABLE) -> int:
    complain(reason)
    return code


def _leave(_: int, __: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    # In force until uvicorn has its own handlers, and again at its end, when it raises the signal once more.
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    sys.exit(main())
