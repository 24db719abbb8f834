"""The control Redis of a cell, and the gateway that reads its logs."""

from collections.abc import Callable, Sequence

from bench.simulate.clock import Clock, Host, Process, Then
from bench.simulate.costs import Costs
from bench.simulate.load import Asked

#: A command does its work when its turn comes: seconds beside `Costs.call`, and whether it has written.
Command = Callable[[], tuple[float, bool]]


class ControlRedis:
    """One thread: the commands that are there when it looks are done together, then the disk syncs once for those that
    write, then all are answered. Nothing is read meanwhile."""

    def __init__(self, clock: Clock, host: Host, costs: Costs) -> None:
        self._clock, self._host, self._costs = clock, host, costs
        self._waiting: list[tuple[Command, Then]] = []
        self._busy = False
        self.busy_s = 0.0

    def call(self, command: Command, then: Then) -> None:
        """A command is sent; `then` when the caller has its answer, which for one that writes is on disk."""

        def comes() -> None:
            self._waiting.append((command, then))
            self._look()

        self._clock.after(self._costs.wire, comes)

    def _look(self) -> None:
        if self._busy or not self._waiting:
            return
        self._busy, began = True, self._clock.now
        now, self._waiting = self._waiting, []
        done = [command() for command, _ in now]
        written = any(writes for _, writes in done)
        seconds = sum(self._costs.call + took for took, _ in done) + written * self._costs.sync

        def synced() -> None:
            self.busy_s += self._clock.now - began
            self._busy = False
            for _, then in now:
                self._clock.after(self._costs.wire, then)
            self._look()

        def waits() -> None:
            if written:
                self._host.wait(self._costs.fsync, synced)
            else:
                synced()

        self._host.compute(seconds, waits)


class LogReader:
    """A gateway's read of the logs of one cell: one blocking command about all that it follows, again and again."""

    def __init__(
        self, redis: ControlRedis, gateway: Process, costs: Costs, tell: Callable[[Sequence[Asked]], None]
    ) -> None:
        """`tell` the clients these tokens, one entry for each."""
        self._redis, self._gateway, self._costs, self._tell = redis, gateway, costs, tell
        self._news: list[Asked] = []
        self._blocked = self._woken = False
        self.followed = 0
        self._read()

    def follow(self) -> None:
        """One request more: a read that is blocked does not ask about it, and is woken."""
        self.followed += 1
        if self._blocked:
            self._redis.call(self._wakes, self.look)

    def _wakes(self) -> tuple[float, bool]:
        self._woken = True
        return self._costs.wake, True

    def written(self, tokens: Sequence[Asked]) -> None:
        """Redis has written these into the logs."""
        self._news += tokens

    def look(self) -> None:
        """Redis answers what it has done: also a blocked read, if there is something in it."""
        if self._blocked and (self._news or self._woken):
            self._blocked = False
            self._answered()

    def _read(self) -> None:
        self._redis.call(self._asks, self._asked)

    def _asks(self) -> tuple[float, bool]:
        return self._costs.read + self._costs.read_stream * self.followed, False

    def _asked(self) -> None:
        self._blocked = True
        self.look()

    def _answered(self) -> None:
        news, self._news, self._woken = self._news, [], False
        costs = self._costs

        def read() -> None:
            self._read()
            if news:
                self._gateway.do(len(news) * costs.gateway_token, lambda: self._tell(news))

        self._gateway.do(costs.gateway_read + costs.gateway_read_stream * self.followed, read)
