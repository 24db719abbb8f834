"""One cell: its control Redis, its gateways' share of work, and routes of workers that batch as the engine does."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.simulate.clock import Clock, Host, Process, Then
from bench.simulate.costs import Costs
from bench.simulate.load import Asked
from blockrelay_worker.scheduling.batch_policy import Candidate, choose_rows
from blockrelay_worker.scheduling.micro_batches import decode_share
from blockrelay_worker.scheduling.step_cost import StepCost, prompt_rows_beside

#: As the settings of a worker have them: BLOCKRELAY_MAX_ROWS, _MAX_REQUESTS, _STEP_TARGET_S.
MAX_ROWS, MAX_REQUESTS, STEP_TARGET_S = 512, 64, 0.5


class ControlRedis:
    """One thread: what is there when it looks is done together, then the disk syncs once, then all are answered."""

    def __init__(self, clock: Clock, host: Host, fsync_s: float) -> None:
        self._clock, self._host, self._fsync_s = clock, host, fsync_s
        self._waiting: list[tuple[float, Then]] = []
        self._busy = False
        self.busy_s = 0.0

    def call(self, seconds: float, then: Then) -> None:
        """A script that writes, and takes so long; `then` when it is on disk and answered."""
        self._waiting.append((seconds, then))
        self._look()

    def _look(self) -> None:
        if self._busy or not self._waiting:
            return
        self._busy, began = True, self._clock.now
        now, self._waiting = self._waiting, []

        def synced() -> None:
            self.busy_s += self._clock.now - began
            self._busy = False
            for _, then in now:
                then()
            self._look()

        self._host.compute(sum(seconds for seconds, _ in now), lambda: self._clock.after(self._fsync_s, synced))


@dataclass(slots=True, eq=False)
class Run:
    """A request on a route: rows of its prompt that are `computed`, tokens that are `given`, and the batch that
    carries it (`flight`), if any."""

    asked: Asked
    computed: int = 0
    given: int = 0
    flight: int | None = None
    last_step: int = 0

    @property
    def missing(self) -> int:
        """Rows that are known and not computed."""
        return max(1, self.asked.prompt - self.computed)

    @property
    def decodes(self) -> bool:
        return self.computed == self.asked.prompt

    def gives(self, rows: int) -> bool:
        """Whether so many rows more give a token."""
        return self.computed + rows >= self.asked.prompt

    def advance(self, rows: int) -> None:
        """So many rows have been computed, by all stages."""
        if self.decodes:
            self.given += 1
        else:
            self.computed += rows
            self.given = int(self.decodes)


@dataclass(slots=True)
class Batch:
    """Rows of runs on their way through the stages."""

    number: int
    rows: dict[Run, int] = field(default_factory=dict[Run, int])

    @property
    def size(self) -> int:
        return sum(self.rows.values())

    def seconds(self, costs: Costs, part: float) -> float:
        """Of a stage with this part of the blocks."""
        decoding = sum(run.decodes for run in self.rows)
        attended = sum(rows * (run.computed + run.given + rows / 2) for run, rows in self.rows.items())
        blocks = costs.blocks.seconds(decoding, self.size - decoding, attended)
        return part * blocks + costs.step + costs.row * self.size


class Route:
    """Workers that serve all blocks: one, or one for each stage. The first decides. `groups` batches circulate."""

    def __init__(self, cell: "Cell", stages: Sequence[Process], groups: int) -> None:
        self._cell, self._stages, self._groups = cell, stages, groups
        self._runs: list[Run] = []
        self._arrived: list[deque[Batch]] = [deque() for _ in stages]
        self._busy = [False] * len(stages)
        self._steps, self._claiming, self._committing = 0, False, False
        self._given: list[Asked] = []  # whose tokens are not in a commit yet

    def look(self) -> None:
        """Claim what waits, and compute what there is."""
        cell, room = self._cell, MAX_REQUESTS - len(self._runs)
        if not self._claiming and room and cell.queue:
            self._claiming = True
            jobs = [cell.queue.popleft() for _ in range(min(room, len(cell.queue)))]

            def claimed() -> None:
                self._claiming = False
                self._runs += [Run(asked) for asked in jobs]
                self.look()

            cell.redis.call(cell.costs.claim + len(jobs) * cell.costs.claim_job, claimed)
        if not self._busy[0] and (batch := self._chosen()).rows:
            for run in batch.rows:
                run.flight = run.last_step = batch.number
            self._compute(0, batch)

    def _chosen(self) -> Batch:
        self._steps += 1
        ready = {str(index): run for index, run in enumerate(self._runs) if run.flight is None}
        decoding = [run for run in self._runs if run.decodes]
        share = decode_share([run.flight for run in decoding], self._groups) if len(self._stages) > 1 else None
        beside = None
        if decoding and len(decoding) < len(self._runs):
            costs = self._cell.costs
            decode_s = costs.blocks.seconds(len(decoding), 0, 0.0) + costs.step + costs.row * len(decoding)
            known = StepCost(decode_s=decode_s, prompt_row_s=costs.blocks.prompt_row + costs.row or None)
            beside = prompt_rows_beside(known, STEP_TARGET_S, MAX_ROWS)
        candidates = [Candidate(name, run.missing, last_step=run.last_step) for name, run in ready.items()]
        chosen = choose_rows(candidates, MAX_ROWS, max_decoding=share, prompt_rows=beside)
        return Batch(self._steps, {ready[name]: rows for name, rows in chosen})

    def _compute(self, stage: int, batch: Batch) -> None:
        self._busy[stage] = True
        seconds = batch.seconds(self._cell.costs, 1 / len(self._stages))
        self._stages[stage].do(seconds, lambda: self._computed(stage, batch))

    def _computed(self, stage: int, batch: Batch) -> None:
        self._busy[stage] = False
        clock, costs = self._cell.clock, self._cell.costs
        if stage + 1 < len(self._stages):
            clock.after(costs.hop + costs.hop_row * batch.size, lambda: self._comes(stage + 1, batch))
        else:
            self._commit(batch)  # beside the next step
            if stage:
                clock.after(costs.hop, lambda: self._back(batch))
            else:
                self._back(batch)
        if stage:
            self._next(stage)
        else:
            self.look()

    def _comes(self, stage: int, batch: Batch) -> None:
        self._arrived[stage].append(batch)
        self._next(stage)

    def _next(self, stage: int) -> None:
        if not self._busy[stage] and self._arrived[stage]:
            self._compute(stage, self._arrived[stage].popleft())

    def _back(self, batch: Batch) -> None:
        """The first stage hears what the batch gave."""
        for run, rows in batch.rows.items():
            run.flight = None
            run.advance(rows)
            if run.given == run.asked.new:
                self._runs.remove(run)
        self.look()

    def _commit(self, batch: Batch) -> None:
        """At most one call is in flight; the next one carries everything since."""
        self._given += [run.asked for run, rows in batch.rows.items() if run.gives(rows)]
        if self._committing or not self._given:
            return
        tokens, self._given, self._committing = self._given, [], True

        def committed() -> None:
            self._committing = False
            self._cell.relay(tokens)
            self._commit(Batch(0))

        costs = self._cell.costs
        self._cell.redis.call(costs.commit + len(tokens) * costs.commit_token, committed)


class Cell:
    """`heard` is called with a request whenever a token of it has reached its client."""

    def __init__(
        self, clock: Clock, costs: Costs, *, redis: Host, gateway: Process, heard: Callable[[Asked], None]
    ) -> None:
        self.clock, self.costs, self.gateway = clock, costs, gateway
        self.redis = ControlRedis(clock, redis, costs.fsync)
        self.queue: deque[Asked] = deque()
        self.routes: list[Route] = []
        self.unfinished = 0
        self._heard = heard

    def send(self, asked: Asked) -> None:
        """A client sends it to a gateway."""
        self.unfinished += 1

        def accepted() -> None:
            self.queue.append(asked)
            for route in self.routes:
                route.look()

        self.gateway.do(self.costs.gateway_request, lambda: self.redis.call(self.costs.accept, accepted))

    def relay(self, tokens: Sequence[Asked]) -> None:
        """A commit is in the logs: the gateway reads it, and sends an event for each token."""

        def sent() -> None:
            for asked in tokens:
                asked.tokens.append(self.clock.now + self.costs.wire)
                self.unfinished -= len(asked.tokens) == asked.new
                self._heard(asked)

        self.gateway.do(len(tokens) * self.costs.gateway_token, sent)
