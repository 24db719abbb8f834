"""Declares workers dead that sent no heartbeat for too long, while silence means something.

Heartbeats do not get through, or cannot be compared, while Redis is away or stands still, when its clock is changed,
and after a failover to a replica that may lack the last ones. After each of these every worker gets a whole
`dead_after_s` to send a heartbeat before silence counts again.
"""

import time
from dataclasses import dataclass, field
from typing import Any, cast

from blockrelay.observability import logs
from blockrelay.protocol.transitions import calls
from blockrelay_scheduler.link import SchedulerLinks
from blockrelay_scheduler.recovery import dead_workers


@dataclass(slots=True)
class Liveness:
    """Declares silent workers dead, by the script DEAD. One thread calls it."""

    link: SchedulerLinks
    dead_after_ms: int
    """The silence that makes a worker dead; the cell's setting, which may change."""
    trusted_from: float = field(default=float("inf"), init=False)
    """The monotonic time (seconds) from which silence counts."""
    settled_from: float = field(default=float("-inf"), init=False)
    """The monotonic time (seconds) from which all times in Redis are by the clock that it has now."""
    dead: set[str] = field(default_factory=set[str], init=False)
    """The ids of workers declared dead here; the caller clears it after it has deleted what they left."""
    _server: str = field(default="", init=False)  # run id of the Redis process
    _clock_ahead_ms: float = field(default=0.0, init=False)  # Redis' clock minus our monotonic one

    @property
    def _dead_after_s(self) -> float:
        return self.dead_after_ms / 1000

    @property
    def trusted(self) -> bool:
        """True if the silence of a worker means something now."""
        return time.monotonic() >= self.trusted_from

    def judge_contact(self, last_tick: float, tick_s: float) -> None:
        """Stops trusting silence if the last round, which began at `last_tick` (monotonic seconds), is long ago.

        Rounds come every `tick_s` seconds unless Redis is away, and then no heartbeat gets through. The first round
        must call it with `-inf`: until then no silence is trusted.
        """
        if time.monotonic() - last_tick > tick_s + self._dead_after_s / 2:
            self._distrust()

    def declare_dead(self) -> None:
        """Declares every worker dead whose last heartbeat is `dead_after_ms` or longer ago by the clock of Redis.

        A heartbeat as far in the future counts too. Adds the ids to `dead`. Does nothing unless silence is `trusted`,
        and stops trusting it if Redis is another process, stood still, or has another time. The first trusted call only
        learns the time of Redis, and stops trusting silence too. Raises RedisTrouble.
        """
        if not self.trusted:
            return
        pipeline = self.link.client.pipeline(transaction=False)
        pipeline.zrange(self.link.keys.workers, 0, -1, withscores=True)
        pipeline.time()
        # Changes nothing, and fails where Redis refuses writes: then no heartbeat arrives and silence means nothing.
        pipeline.zadd(self.link.keys.workers, {"": 0}, xx=True)
        pipeline.info("server")
        sent = time.monotonic()
        heartbeats, now, _, server = cast(Any, pipeline.execute())
        if self._is_another(server["run_id"]):
            self._distrust()
            return
        if time.monotonic() - sent > self._dead_after_s / 2:
            self._distrust()  # Redis stood still: the heartbeats of that time are still on their way
            return
        now_ms = now[0] * 1000 + now[1] // 1000
        if self._clock_stepped(now_ms):
            self._distrust()  # until all heartbeats and times of progress are by the new clock
            self.settled_from = self.trusted_from
            return
        silent_ms = {worker_id.decode(): now_ms - int(beat_ms) for worker_id, beat_ms in heartbeats}
        for worker_id in dead_workers(silent_ms, dead_after_ms=self.dead_after_ms):
            died, reruns = self.link.scripts.run(calls.dead(worker_id, silent_s=self._dead_after_s))
            if died:
                self.dead.add(worker_id)
                logs.get().warning("WORKER_DEAD", worker=worker_id, silent_ms=silent_ms[worker_id], reruns=reruns)

    def _distrust(self) -> None:
        self.trusted_from = time.monotonic() + self._dead_after_s

    def _is_another(self, run_id: str) -> bool:
        """Returns whether the Redis process is another one than at the last look: a restart, or a failover."""
        before, self._server = self._server, run_id
        return before not in ("", run_id)

    def _clock_stepped(self, now_ms: int) -> bool:
        """Returns whether the clock of Redis, which dates the heartbeats, was changed since the last look."""
        ahead_ms = now_ms - time.monotonic() * 1000
        stepped = abs(ahead_ms - self._clock_ahead_ms) > self.dead_after_ms / 2
        if stepped and self._clock_ahead_ms:
            logs.get().warning("CLOCK_STEPPED", seconds=round((ahead_ms - self._clock_ahead_ms) / 1000, 1))
        self._clock_ahead_ms = ahead_ms
        return stepped
