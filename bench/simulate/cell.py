"""A simulated cell: its queue, and routes of workers that claim, batch and commit as the engine does."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.simulate.clock import Clock, Host, Process
from bench.simulate.control_redis import ControlRedis, LogReader
from bench.simulate.costs import Costs, Work
from bench.simulate.load import ClientRequest
from blockrelay.settings import WorkerSettings
from blockrelay_worker.scheduling.batch_policy import Candidate, choose_tokens
from blockrelay_worker.scheduling.micro_batches import decode_share
from blockrelay_worker.scheduling.step_cost import StepCost, prompt_tokens_beside

_SETTINGS = WorkerSettings.model_fields
MAX_ROWS: int = _SETTINGS["max_rows"].default
MAX_REQUESTS: int = _SETTINGS["max_requests"].default
STEP_TARGET_S: float = _SETTINGS["step_target_s"].default
#: Shares of a gateway's work for a request: before ACCEPT, after it, and after the end of its stream. Assumed.
BEFORE_ACCEPT, BEHIND_ACCEPT, BEHIND_END = 0.3, 0.5, 0.2
#: Most jobs of one CLAIM, as in `engine/loop.py`.
MAX_JOBS = 16
#: Rows of the prompt by which a worker learns the seconds of one.
SOME_ROWS = 64


@dataclass(slots=True, eq=False)
class Run:
    """A request on a route."""

    request_id: ClientRequest
    computed: int = 0
    """Tokens of the prompt that all stages have computed."""
    given: int = 0
    """Tokens that it has generated."""
    flight: int | None = None
    """The number of the batch with rows of it; None: none is on its way."""
    last_step: int = 0
    """The number of its last batch."""

    @property
    def missing(self) -> int:
        """The number of known tokens that are not computed yet; 0 when the request has all its tokens."""
        return 0 if self.given == self.request_id.new else max(1, self.request_id.prompt - self.computed)

    @property
    def decodes(self) -> bool:
        """True if the whole prompt is computed."""
        return self.computed == self.request_id.prompt

    def gives(self, rows: int) -> bool:
        """Returns whether it generates a token after `rows` more rows."""
        return self.computed + rows >= self.request_id.prompt

    def advance(self, rows: int) -> None:
        """Notes that all stages have computed `rows` more rows."""
        if self.decodes:
            self.given += 1
        else:
            self.computed += rows
            self.given = int(self.decodes)


@dataclass(slots=True)
class Batch:
    """A batch on its way through the stages: its number, and the number of rows of each run in it."""

    number: int
    rows: dict[Run, int] = field(default_factory=dict[Run, int])

    @property
    def size(self) -> int:
        """The number of rows."""
        return sum(self.rows.values())

    @property
    def work(self) -> Work:
        """The amount of work in the batch."""
        attended = {True: 0.0, False: 0.0}
        for run, rows in self.rows.items():
            attended[run.decodes] += rows * (run.computed + run.given + rows / 2)
        tokens = sum(run.gives(rows) for run, rows in self.rows.items())
        return Work(self.size, tokens, attended[True], attended[False])


@dataclass(slots=True)
class Worker:
    """A worker process. Its threads (one computes; others commit and read messages) share the Python interpreter."""

    kernels: Process
    """The native kernels, which run without the interpreter."""
    interpreter: Process
    """The interpreter, on which the threads take turns."""
    arrived: deque[Batch] = field(default_factory=deque[Batch])
    """Batches that wait for it."""
    busy: bool = False
    """True while its engine thread has a step or waits for an answer."""
    computing: bool = False
    """True while its kernels run."""
    neighbours: list["Worker"] = field(default_factory=list["Worker"])
    """The other workers of the host."""

    def compute(self, part: float, blocks: int, beside: float, then: Callable[[], None]) -> None:
        """Computes `blocks` blocks of `part` seconds each, and takes the interpreter after each; then calls `then`.

        A block takes `beside` times as long if a neighbour computes when it begins.
        """

        def done() -> None:
            self.computing = False
            self.interpreter.do(0.0, then if blocks == 1 else lambda: self.compute(part, blocks - 1, beside, then))

        slowed = any(one.computing for one in self.neighbours)
        self.computing = True
        self.kernels.do(part * (beside if slowed else 1.0), done)


class Route:
    """The workers that serve all blocks together, one for each stage; the first one decides what is computed.

    Up to `groups` batches are in flight.
    """

    def __init__(self, cell: "Cell", stages: Sequence[Worker], groups: int) -> None:
        self._cell, self._stages, self._groups = cell, stages, groups
        self._blocks = cell.costs.stages(len(stages))
        self._runs: list[Run] = []
        self._steps, self._claim_due, self._committing = 0, True, False
        self._given: list[Run] = []  # a run for each token that is not in a commit yet

    def wake(self) -> None:
        """Tells the route that there may be jobs; another thread of its first worker takes the message."""

        def told() -> None:
            self._claim_due = True
            self._look()

        self._stages[0].interpreter.do(self._cell.costs.notice, told)

    def _look(self) -> None:
        """Runs the engine's loop once: claims jobs if any may wait, or computes a step."""
        if self._stages[0].busy:
            return
        if self._claim_due and (room := MAX_REQUESTS - len(self._runs)) > 0:
            self._claim(min(room, MAX_JOBS))
        else:
            self._step()

    def _step(self) -> None:
        """Computes a batch if there is one, or else looks for jobs."""
        if (batch := self._chosen()).rows:
            for run in batch.rows:
                run.flight = run.last_step = batch.number
            self._compute(0, batch)
        elif self._claim_due and len(self._runs) < MAX_REQUESTS:
            self._look()

    def _claim(self, most: int) -> None:
        """Claims up to `most` jobs; the engine waits for the answer."""
        self._claim_due, self._stages[0].busy = False, True
        cell, jobs = self._cell, list[ClientRequest]()

        def claims() -> tuple[float, bool]:
            jobs.extend(cell.queue.popleft() for _ in range(min(most, len(cell.queue))))
            return cell.costs.claim + len(jobs) * cell.costs.claim_job, bool(jobs)

        def taken() -> None:
            self._stages[0].busy = False
            self._runs += [Run(request) for request in jobs]
            self._claim_due |= len(jobs) == most
            self._step()

        def answered() -> None:
            self._stages[0].interpreter.do(cell.costs.ask + len(jobs) * cell.costs.ask_job, taken)

        cell.redis.call(claims, answered)

    def _chosen(self) -> Batch:
        """Returns the next batch, chosen by the worker's own batch policy."""
        self._steps += 1
        ready = {str(index): run for index, run in enumerate(self._runs) if run.flight is None and run.missing}
        decoding = [run for run in self._runs if run.decodes and run.missing]
        several = len(self._stages) > 1
        share = decode_share([run.flight for run in decoding], self._groups) if several else None
        most = MAX_ROWS if self._groups == 1 else MAX_ROWS // (2 * self._groups)
        beside = None
        if decoding and any(run.missing > 1 for run in ready.values()):
            count = len(decoding)
            decode_s, some_s = self._step_s(Work(count, count), count), self._step_s(Work(SOME_ROWS, 1), 1)
            known = StepCost(decode_s=decode_s, prompt_token_s=some_s / SOME_ROWS)
            beside = prompt_tokens_beside(known, STEP_TARGET_S / len(self._stages), most)
        candidates = [Candidate(name, run.missing, last_step=run.last_step) for name, run in ready.items()]
        chosen = choose_tokens(candidates, most, max_decoding=share, prompt_tokens=beside)
        return Batch(self._steps, {ready[name]: rows for name, rows in chosen})

    def _step_s(self, work: Work, parts: int, stage: int = 0) -> float:
        """Seconds of a step with rows of `parts` requests, on a stage."""
        costs = self._cell.costs
        return self._blocks[stage].seconds(work) + costs.part * parts

    def _compute(self, stage: int, batch: Batch) -> None:
        """Runs a step of a stage, and sends the message with which it ends."""
        costs, last = self._cell.costs, stage + 1 == len(self._stages)
        work = batch.work
        message, commands = 0.0, 0.0
        if not last:
            message = costs.hop + costs.hop_row * batch.size + costs.hop_part * len(batch.rows)
            commands = 2
        elif work.tokens and stage:
            message, commands = costs.hop + costs.hop_job * work.tokens, work.tokens
        worker, blocks = self._stages[stage], self._blocks[stage]
        worker.busy = True

        def computed() -> None:
            if len(self._stages) == 1:
                self._computed(stage, batch)
                return
            there = (lambda: self._back(batch)) if last else (lambda: self._comes(stage + 1, batch))
            self._send(0 if last else stage + 1, commands * costs.call, message / 2, there)

            def sent() -> None:
                self._cell.clock.after(costs.wire, lambda: self._computed(stage, batch))

            self._cell.payload.do(0.0, sent)

        def begins() -> None:
            part, then = blocks.seconds(work) / blocks.count, lambda: worker.interpreter.do(message / 2, computed)
            worker.compute(part, blocks.count, costs.beside(work.rows), then)

        worker.interpreter.do(costs.part * len(batch.rows), begins)

    def _computed(self, stage: int, batch: Batch) -> None:
        """Ends a step: the engine begins the next one first, and then hands the new tokens to the commit thread."""
        self._stages[stage].busy = False
        gave = [run for run, rows in batch.rows.items() if run.gives(rows)]
        if len(self._stages) == 1:
            self._back(batch)
        elif stage:
            self._next(stage)
        else:
            self._look()
        if stage + 1 == len(self._stages):
            self._commit(gave)

    def _send(self, stage: int, payload_s: float, received_s: float, then: Callable[[], None]) -> None:
        """Sends a message to a stage: by the payload Redis to its reader thread, and from there to its engine."""
        interpreter, clock, wire = self._stages[stage].interpreter, self._cell.clock, self._cell.costs.wire
        late_s = min(received_s, self._cell.costs.hop_late)

        def delivered() -> None:
            then()
            interpreter.do(late_s, lambda: None)  # while the kernels compute

        def read() -> None:
            interpreter.do(received_s - late_s, lambda: clock.after(wire, delivered))

        self._cell.payload.do(payload_s, lambda: clock.after(wire, read))

    def _comes(self, stage: int, batch: Batch) -> None:
        self._stages[stage].arrived.append(batch)
        self._next(stage)

    def _next(self, stage: int) -> None:
        worker = self._stages[stage]
        if not worker.busy and worker.arrived:
            self._compute(stage, worker.arrived.popleft())

    def _back(self, batch: Batch) -> None:
        """Gives the result of a batch to the first stage."""
        for run, rows in batch.rows.items():
            run.flight = None
            run.advance(rows)
        self._look()

    def _commit(self, given: Sequence[Run]) -> None:
        """Commits the tokens of `given`, one entry of a run for each token.

        At most one COMMIT is in flight, and the next one has everything since. A run leaves the route with its last
        token's commit.
        """
        self._given += given
        if self._committing or not self._given:
            return
        runs, self._given, self._committing = self._given, [], True
        cell, costs, last = self._cell, self._cell.costs, self._stages[-1]
        ended = self._ending(runs)
        tokens = [run.request_id for run in runs]

        def commits() -> tuple[float, bool]:
            cell.logs.written(tokens)
            return costs.commit + len(runs) * costs.commit_token + len(ended) * costs.commit_end, True

        def committed() -> None:
            self._committing = False
            cell.logs.look()
            if last is not self._stages[0]:  # the real COMMIT also tells the first stage of these tokens
                self._stages[0].interpreter.do((costs.hop + costs.hop_job * len(runs)) / 2, lambda: None)
            for run in ended:
                self._runs.remove(run)
            if ended:
                self._claim_due = True
                self._look()
            self._commit(())

        seconds = costs.submit + len(runs) * costs.submit_token
        last.interpreter.do(seconds, lambda: cell.redis.call(commits, committed))

    def _ending(self, runs: Sequence[Run]) -> list[Run]:
        """Counts the tokens of `runs`, one entry for each, as committed; returns the runs that have ended with them."""
        for run in runs:
            run.request_id.committed += 1
        return [run for run in dict.fromkeys(runs) if run.request_id.committed == run.request_id.new]


class Cell:
    """A cell with its control Redis, gateway and routes; the caller adds the routes."""

    def __init__(
        self,
        clock: Clock,
        costs: Costs,
        *,
        redis: Host,
        gateway: Process,
        clients: Process,
        heard: Callable[[ClientRequest], None],
    ) -> None:
        """`redis` is the host of the Redis servers; `heard` is called with a request for each token at its client."""
        self.clock, self.costs, self.gateway = clock, costs, gateway
        self.redis = ControlRedis(clock, redis, costs)
        self.payload = Process(redis)
        self.logs = LogReader(self.redis, gateway, costs, self._sent)
        self.queue: deque[ClientRequest] = deque()
        self.routes: list[Route] = []
        self.unfinished = 0
        self._clients, self._heard = clients, heard

    def send(self, request: ClientRequest) -> None:
        """Sends a request from a client to the gateway."""
        self.unfinished += 1
        costs = self.costs

        def accepts() -> tuple[float, bool]:
            self.queue.append(request)
            return costs.accept, True

        def accepted() -> None:
            self.gateway.do(costs.gateway_request * BEHIND_ACCEPT, lambda: None)
            for route in self.routes:
                route.wake()

        def follow() -> None:
            self.redis.call(accepts, accepted)
            self.logs.follow()

        def sent() -> None:
            before = costs.gateway_request * BEFORE_ACCEPT
            self.clock.after(costs.cold + costs.wire, lambda: self.gateway.do(before, follow))

        self._clients.do(costs.client_request, sent)

    def _sent(self, tokens: Sequence[ClientRequest]) -> None:
        """Delivers tokens to clients after the gateway has written them; one entry of a request for each token."""

        def came() -> None:
            for request in tokens:
                request.tokens.append(self.clock.now)
                if len(request.tokens) == request.new:
                    self.unfinished -= 1
                    self.logs.followed -= 1
                    self.gateway.do(self.costs.gateway_request * BEHIND_END, lambda: None)
                self._heard(request)

        seconds = len(tokens) * self.costs.client_token
        self.clock.after(self.costs.wire, lambda: self._clients.do(seconds, came))
