"""`python -m blockrelay_gateway`: settings from options or BLOCKRELAY_*, one process, one event loop.

SIGTERM lets it end what it has accepted, SIGINT (Ctrl-C) tells clients at once how to go on, and a second signal waits
for nothing. Exit codes: 0 after a signal, 2 when it cannot start for a reason that one line explains, 70 for what
another start may not meet.
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
from blockrelay.redis.client import check_redis, connect
from blockrelay.settings import GatewaySettings, read_settings
from blockrelay_gateway.api.operations.scrape import metrics_port
from blockrelay_gateway.api.state import Gateway
from blockrelay_gateway.app import create_app
from blockrelay_gateway.draining.course import Course, Phase, course_from
from blockrelay_gateway.http.server import accept_the_last, server_config

#: Seconds in which a gateway that ends at once still writes what tells its readers so.
LAST_EVENT_S = 0.1


class GatewayServer(uvicorn.Server):
    """Takes its course from a signal on (`draining.course`), and ends with the gateway's background work: one without
    it must not look alive."""

    _loop: asyncio.AbstractEventLoop

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._course: Course | None = None
        self._alarm: asyncio.TimerHandle | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        watching = asyncio.create_task(self._end_when_broken())
        try:
            await super().serve(sockets)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await accept_the_last(sockets or [])
        await super().shutdown(sockets)

    async def _end_when_broken(self) -> None:
        await self._gateway.broken.wait()
        self._end(None)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal handler, in the middle of anything: what touches tasks is left to the event loop."""
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
            told = signal.Signals(number).name if number else ""
            logs.get().info("NODE_DRAINING", signal=told, connections=len(self.server_state.connections))
        self._follow(self._course)

    def _follow(self, course: Course) -> None:
        """Do what the phase that has come says, and look again when it is over."""
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
        """A connection that stays open would keep the server from ending."""
        self.force_exit = len(self._captured_signals) > 1
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class _JsonLog(logging.Handler):
    """uvicorn's own messages as log lines of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        detail = {"exc_info": record.exc_info} if record.exc_info else {}
        # It says so of every handshake that is refused, too.
        level = logging.DEBUG if "without completing handshake" in record.getMessage() else record.levelno
        logs.get().log(level, "SERVER_MESSAGE", message=record.getMessage(), **detail)


def main() -> int:
    """Serve until a signal, and as long as it lets requests go on. The exit code."""
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
    """Join all cells. Raises UsageError when a Redis will never serve us like this; one that does not answer now, or a
    cell that has to be upgraded, is waited for later."""
    for name, place in cells_of(settings).places.items():
        with connect(place.redis_url, cell=name) as control, contextlib.suppress(RedisTrouble):
            check_redis(control, "control Redis", cell=Keys(name))
        if place.payload_redis_url:
            with connect(place.payload_redis_url, cell=name) as payload, contextlib.suppress(RedisTrouble):
                check_redis(payload, "payload Redis")


def allow_files(wanted: int) -> None:
    """Raise the limit of open files as far as we may: without a file a connection to Redis cannot come back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def tcp_socket(host: str) -> socket.socket:
    """A socket for `host` that says it is TCP: asyncio sends small writes at once (TCP_NODELAY) only on such ones.

    Otherwise every answer's first event waits for the client's delayed acknowledgement of the headers, 40 ms.
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
    if gateway.broken.is_set():
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
