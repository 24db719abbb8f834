"""A simulated control Redis, and the gateway's reads of its token logs."""

from collections.abc import Callable, Sequence

from bench.simulate.clock import Clock, Host, Process, Then
from bench.simulate.costs import Costs
from bench.simulate.load import ClientRequest

#: A command, called when Redis executes it: returns its seconds besides `Costs.call`, and whether it has written.
Command = Callable[[], tuple[float, bool]]


class ControlRedis:
    """The control Redis: one thread that executes commands in rounds.

    A round takes all commands that have arrived, syncs the disk once if any of them writes, and then answers all. It
    reads nothing meanwhile. `busy_s` are the seconds of all rounds, with their waits for the disk.
    """

    def __init__(self, clock: Clock, host: Host, costs: Costs) -> None:
        self._clock, self._host, self._costs = clock, host, costs
        self._waiting: list[tuple[Command, Then]] = []
        self._busy = False
        self.busy_s = 0.0

    def call(self, command: Command, then: Then) -> None:
        """Sends a command, and calls `then` when its answer arrives; what it wrote is on disk by then."""

        def comes() -> None:
            self._waiting.append((command, then))
            self._look()

        self._clock.after(self._costs.wire, comes)

    def _look(self) -> None:
        """Runs a round if the server is free and commands wait."""
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
    """A gateway's reads of the token logs of one cell: one blocking command on all logs that it follows, repeatedly.

    `followed` is the number of these logs; the caller counts it down at the end of a request.
    """

    def __init__(
        self, redis: ControlRedis, gateway: Process, costs: Costs, tell: Callable[[Sequence[ClientRequest]], None]
    ) -> None:
        """`tell` is called with new tokens, one entry of a request for each, after the gateway has read them."""
        self._redis, self._gateway, self._costs, self._tell = redis, gateway, costs, tell
        self._news: list[ClientRequest] = []
        self._blocked = self._woken = False
        self.followed = 0
        self._read()

    def follow(self) -> None:
        """Follows one more request. A blocked read does not include its log, and is woken."""
        self.followed += 1
        if self._blocked:
            self._redis.call(self._wakes, self.look)

    def _wakes(self) -> tuple[float, bool]:
        self._woken = True
        return self._costs.wake, True

    def written(self, tokens: Sequence[ClientRequest]) -> None:
        """Notes that Redis has written tokens into the logs, one entry of a request for each."""
        self._news += tokens

    def look(self) -> None:
        """Ends a blocked read if there are new tokens for it, or if it was woken."""
        if self._blocked and (self._news or self._woken):
            self._blocked = False
            self._answered()

    def _read(self) -> None:
        self._redis.call(self._reads, self._blocks)

    def _reads(self) -> tuple[float, bool]:
        return self._costs.read + self._costs.read_stream * self.followed, False

    def _blocks(self) -> None:
        self._blocked = True
        self.look()

    def _answered(self) -> None:
        """Ends a read in the gateway, which begins the next one and then handles the new tokens."""
        news, self._news, self._woken = self._news, [], False
        costs = self._costs

        def read() -> None:
            self._read()
            if news:
                self._gateway.do(len(news) * costs.gateway_token, lambda: self._tell(news))

        self._gateway.do(costs.gateway_read + costs.gateway_read_stream * self.followed, read)
