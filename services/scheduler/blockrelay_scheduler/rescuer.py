"""Ends requests whose deadline has passed, queues stuck ones again, and deletes old dead letters.

`recovery` decides; this module reads the requests from Redis and performs the decisions.
"""

from dataclasses import dataclass, field
from typing import Any, cast

from blockrelay.observability import logs
from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.transitions import calls
from blockrelay.settings import SchedulerSettings
from blockrelay_scheduler.link import SchedulerLinks
from blockrelay_scheduler.policy import LOOK_LIMIT
from blockrelay_scheduler.recovery import UnfinishedRequest, rescues


@dataclass(slots=True)
class Rescuer:
    """Walks through the unfinished requests of the cell, about LOOK_LIMIT at each look. One thread calls it."""

    link: SchedulerLinks
    settings: SchedulerSettings
    _cursor: int = field(default=0, init=False)  # of ZSCAN

    def rescue(self) -> None:
        """Looks at some of the unfinished requests and performs what `recovery` decides.

        Raises RedisTrouble, and WireError for a stalled request whose record cannot be read.
        """
        acts = rescues(
            self._unfinished(),
            stalled_after_s=self.settings.stalled_after_s,
            prompt_tokens_per_s=self.settings.prompt_tokens_per_s,
            fallback_wait_s=self.settings.fallback_wait_s,
        )
        for rescue in acts:
            log = logs.get().bind(request_id=rescue.request_id)
            if rescue.act == "expire":
                if self.link.scripts.run(calls.finish(rescue.request_id, "expired")) == "FINISHED":
                    log.info("REQUEST_EXPIRED")
            elif rescue.act == "give_up":
                message = (
                    f"a GPU failed, fallback: deny keeps the request from CPUs, and no GPU came for "
                    f"{self.settings.fallback_wait_s:g} s (BLOCKRELAY_FALLBACK_WAIT_S)"
                )
                meta = {"error": message, "code": "fallback_denied"}
                finish = calls.finish(rescue.request_id, "error", meta=meta, denied=True)
                if self.link.scripts.run(finish) == "FINISHED":
                    log.warning("REQUEST_WITHOUT_GPU")
            elif self.link.scripts.run(calls.rerun(rescue.request_id, rescue.run_id, "stalled")).ended:
                log.warning("REQUEST_STALLED", run=rescue.run_id)

    def forget_letters(self) -> None:
        """Deletes dead letters older than the setting `dead_letters_s`, because they have users' prompts.

        Raises RedisTrouble.
        """
        seconds, _ = cast(Any, self.link.client.time())
        oldest_ms = max(0, seconds - self.settings.dead_letters_s) * 1000
        self.link.client.xtrim(self.link.keys.dead_letters, minid=oldest_ms, approximate=False)

    def _unfinished(self) -> list[UnfinishedRequest]:
        """Reads the next unfinished requests without progress for a second or longer.

        Requests are read in any order, not the oldest first: a stuck one may be behind any number of waiting ones.
        Their prompts are read only where they may be stuck.
        """
        client, keys = self.link.client, self.link.keys
        seconds, micros = cast(Any, client.time())
        now_ms = seconds * 1000 + micros // 1000
        for member in cast(list[bytes], client.zrangebyscore(keys.running, now_ms + 1000, "+inf", 0, LOOK_LIMIT)):
            client.zadd(keys.running, {member: now_ms}, xx=True, lt=True)  # the clock was put back
        self._cursor, members = cast(Any, client.zscan(keys.running, self._cursor, count=LOOK_LIMIT))
        idle = [(member, moved_ms) for member, moved_ms in members if moved_ms <= now_ms - 1000]
        ask = client.pipeline(transaction=False)
        for member, _ in idle:
            ask.hmget(keys.request(member.decode()), "state", "run", "committed", "deadline_ms", "denied_ms")
        requests: list[UnfinishedRequest] = []
        for (member, moved_ms), (state, run, n, deadline, denied) in zip(idle, ask.execute(), strict=True):
            request_id, idle_ms = member.decode(), now_ms - int(moved_ms)
            tokens = 0
            if state == b"running" and idle_ms > 1000 * self.settings.stalled_after_s:
                body = cast(bytes | None, client.hget(keys.request(request_id), "body"))
                tokens = int(n or 0) + (RequestBody.decode(body).prompt.size if body else 0)
            requests.append(
                UnfinishedRequest(
                    id=request_id,
                    state=(state or b"").decode(),
                    run_id=(run or b"").decode(),
                    idle_ms=idle_ms,
                    tokens=tokens,
                    overdue_ms=now_ms - int(deadline) if deadline and int(deadline) else None,
                    denied_ms=now_ms - int(denied) if denied else None,
                )
            )
        return requests
