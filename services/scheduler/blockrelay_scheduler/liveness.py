"""Which workers are dead: silent for too long, at a time at which silence means something.

While Redis was away, stood still, had its clock set anew or was replaced by another, whom the last beats have perhaps
not reached, nobody's beats got through or could be compared. From then on every worker gets a whole `dead_after_s` to
beat before the silence of any counts again.
"""

import time
from dataclasses import dataclass, field
from typing import Any, cast

from blockrelay.observability import logs
from blockrelay.protocol.transitions import calls
from blockrelay_scheduler.link import Link
from blockrelay_scheduler.recovery import dead_workers


@dataclass(slots=True)
class Liveness:
    """Declares silent workers dead (DEAD). `dead_after_ms` is the cell's, and may change.

    Moments are of the monotonic clock: from `trusted_from` on silence counts; from `settled_from` on the times in Redis
    are all by the clock that it was set to. `dead` are those declared so that nobody has cleared away yet.
    """

    link: Link
    dead_after_ms: int
    trusted_from: float = field(default=float("inf"), init=False)
    settled_from: float = field(default=float("-inf"), init=False)
    dead: set[str] = field(default_factory=set[str], init=False)
    _server: str = field(default="", init=False)  # its run id
    _clock_ahead_ms: float = field(default=0.0, init=False)  # Redis' clock minus our monotonic one

    @property
    def _dead_after_s(self) -> float:
        return self.dead_after_ms / 1000

    @property
    def trusted(self) -> bool:
        """Whether the silence of a worker means something now."""
        return time.monotonic() >= self.trusted_from

    def judge_contact(self, last_tick: float, tick_s: float) -> None:
        """The last round began at `last_tick`: when that is long ago, Redis was away and nobody could beat."""
        if time.monotonic() - last_tick > tick_s + self._dead_after_s / 2:
            self._distrust()

    def declare_dead(self) -> None:
        """One look at all beats. Raises RedisTrouble."""
        if not self.trusted:
            return
        head = self.link.client.pipeline(transaction=False)
        head.zrange(self.link.keys.workers, 0, -1, withscores=True)
        head.time()
        # Changes nothing, and fails where Redis takes no beats: then the silence of workers means nothing.
        head.zadd(self.link.keys.workers, {"": 0}, xx=True)
        head.info("server")
        asked = time.monotonic()
        beats, now, _, server = cast(Any, head.execute())
        if self._is_another(server["run_id"]):
            self._distrust()
            return
        if time.monotonic() - asked > self._dead_after_s / 2:
            self._distrust()  # Redis stood still: the beats of that time are still on their way
            return
        now_ms = now[0] * 1000 + now[1] // 1000
        if self._clock_stepped(now_ms):
            self._distrust()  # until everybody has beaten, and moved, by the new time
            self.settled_from = self.trusted_from
            return
        silent_ms = {worker.decode(): now_ms - int(beat) for worker, beat in beats}
        for worker in dead_workers(silent_ms, dead_after_ms=self.dead_after_ms):
            died, reruns = self.link.scripts.run(calls.dead(worker, silent_s=self._dead_after_s))
            if died:
                self.dead.add(worker)
                logs.get().warning("WORKER_DEAD", worker=worker, silent_ms=silent_ms[worker], reruns=reruns)

    def _distrust(self) -> None:
        self.trusted_from = time.monotonic() + self._dead_after_s

    def _is_another(self, run_id: str) -> bool:
        """Whether this is another server process than at the last look: a restart, or a failover."""
        before, self._server = self._server, run_id
        return before not in ("", run_id)

    def _clock_stepped(self, now_ms: int) -> bool:
        """Whether Redis' clock, which dates the beats, was set anew since the last look."""
        ahead_ms = now_ms - time.monotonic() * 1000
        stepped = abs(ahead_ms - self._clock_ahead_ms) > self.dead_after_ms / 2
        if stepped and self._clock_ahead_ms:
            logs.get().warning("CLOCK_STEPPED", seconds=round((ahead_ms - self._clock_ahead_ms) / 1000, 1))
        self._clock_ahead_ms = ahead_ms
        return stepped
