"""The draft model: a small model with all its blocks, which guesses the next tokens of runs of another one.

It draws with the parameters, seed and positions of the request, as the served model does: with equal logits it guesses
the very same token, and sampled tokens are guessed as well as greedy ones.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from blockrelay.errors import ExecutionError
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.runs.run import Run
from blockrelay_worker.sampling.row_sampler import Sampler
from blockrelay_worker.sampling.sampler import NO_TOKEN, Draw
from blockrelay_worker.scheduling.step_cost import StepCost, observed
from blockrelay_worker.speculation.draft_runs import DraftRun, DraftRuns

#: Longest time in seconds of one call of the draft model, and of all its calls before one step: a worker that stands
#: still for longer looks stuck on a slow machine.
LONGEST_CALL_S = 0.25
#: Calls that took longer, after which the draft model is not used any more: one may be the machine's fault.
LONG_CALLS = 3
#: Seconds of all calls before one step in which tokens of before are computed, by expectation; and most such tokens.
CATCH_UP_S, CATCH_UP_ROWS = 0.05, 256
#: Calls of each kind that measure what one costs, when the model has been loaded.
WARM_CALLS = 5
#: Tokens of before that are computed in the same call as the first guess.
FEW = 16


@dataclass(slots=True)
class _Guessing:
    """The guesses of one run that are being made."""

    state: DraftRun
    limit: int
    guesses: list[int]


class DraftModel:
    """A draft model and what it has of each run. One thread uses it.

    All methods but `look` and `clear` raise ExecutionError if the model fails, or took too long too often.
    """

    def __init__(
        self, executor: Executor, sampler: Sampler, *, context: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`executor` has all blocks of the model, and `context` is its maximum number of tokens."""
        self._executor, self._sample, self._context, self._clock = executor, sampler, context, clock
        self._runs = DraftRuns(executor.pool)
        self._long_calls = 0
        #: What its calls cost: those that guess as decode tokens, those that catch up as prompt tokens.
        self.cost = StepCost()

    @property
    def runs_held(self) -> int:
        """Number of runs of which it has something."""
        return len(self._runs)

    def look(self, runs: Sequence[Run]) -> tuple[int, int]:
        """Judges guesses and forgets runs that have gone (`DraftRuns.look`)."""
        return self._runs.look(runs)

    def clear(self) -> None:
        """Forgets all runs, and frees the memory of the model. It cannot be used afterwards."""
        self._runs.clear()
        self._executor.close()

    def call_s(self, runs: int) -> float:
        """Expected seconds of a call that makes one guess for each of `runs` runs."""
        cost = self.cost
        measured = cost.measured_size(runs)
        return cost.by_tokens[measured] if measured is not None else cost.decode_s or 0.0

    def lacks(self, run: Run) -> int:
        """Number of the run's tokens, beyond those of an ordinary step, that it would compute before a guess."""
        lacking = self._runs.of(run).missing
        return 0 if lacking <= FEW else lacking

    def catch_up_s(self, rows: int) -> float:
        """Expected seconds to compute `rows` tokens of prompts."""
        return rows * (self.cost.prompt_token_s or 0.0)

    def warm_up(self) -> None:
        """Measures calls of one row and of many: of several the fastest, since the machine may have other work."""
        several = [[self._trial_call(rows) for rows in (1, FEW)] for _ in range(WARM_CALLS)]
        one_s, few_s = (min(seconds) for seconds in zip(*several, strict=True))
        self.cost, self._long_calls = StepCost(decode_s=one_s, by_tokens={1: one_s}, prompt_token_s=few_s / FEW), 0

    def measure(self) -> float:
        """Measures a call of one row again, and returns its seconds; without a free page it measures nothing."""
        return self._trial_call(1) if self._executor.pool.free_pages else 0.0

    def _trial_call(self, rows: int) -> float:
        began, pages = self._clock(), self._executor.pool.allocate(1)
        try:
            self._call([Segment(rows=rows, first_position=0, pages=pages)], [0] * rows, guesses=rows == 1)
        finally:
            self._executor.pool.free(pages)
        return self._clock() - began

    def catch_up(self, runs: Sequence[Run]) -> None:
        """Computes tokens that it lacks of these runs, in order, as many as CATCH_UP_S seconds allow."""
        token_s = self.cost.prompt_token_s
        room = CATCH_UP_ROWS if not token_s else min(CATCH_UP_ROWS, int(CATCH_UP_S / token_s))
        room = max(FEW, room)
        parts: list[tuple[DraftRun, int]] = []
        for run in runs:
            state = self._runs.of(run)
            rows = min(room, state.missing - 1, self._context - len(state.tokens))
            if rows > 0 and not state.is_spoiled and self._runs.grow(state, len(state.tokens) + rows):
                parts.append((state, rows))
                room -= rows
        if parts:
            self._compute(parts, guesses=False)

    def guess(self, asked: Sequence[tuple[Run, int]]) -> list[list[int]]:
        """Returns up to as many guesses as asked for each run; none for a run that it has too little of.

        It ends early rather than exceed LONGEST_CALL_S seconds for all calls together, by expectation.
        """
        began = self._clock()
        guessing: list[_Guessing | None] = []
        for run, limit in asked:
            state = self._runs.of(run)
            state.forget_guesses()
            known = len(run.tokens)
            limit = min(limit, self._context - known)
            able = limit > 0 and not state.is_spoiled and 0 < state.missing <= FEW
            able = able and self._runs.grow(state, known + limit - 1)
            guessing.append(_Guessing(state, limit, []) if able else None)
        active = [one for one in guessing if one is not None]
        for one in active:
            one.state.known = len(one.state.run.tokens)
        while active:
            drawn = self._guess_once(active)
            active = [one for one, token in zip(active, drawn, strict=True) if token is not None]
            active = [one for one in active if len(one.guesses) < one.limit]
            if self._clock() - began + self.call_s(len(active)) > LONGEST_CALL_S:
                break
        for one in guessing:
            if one is not None:
                one.state.guessed = tuple(one.guesses)
        return [[] if one is None else one.guesses for one in guessing]

    def _guess_once(self, active: list[_Guessing]) -> list[int | None]:
        """Makes the next guess of each run; None where no guess is possible."""
        # Behind the tokens that are known, the run goes on with the guesses.
        parts = [(one.state, one.state.missing + len(one.guesses)) for one in active]
        bad = self._compute(parts, guesses=True, behind=[one.guesses for one in active])
        logits = self._logits
        draws = [
            Draw(
                logits[i],
                replace(one.state.run.params, logprobs=None),
                one.state.run.seed,
                len(one.state.run.tokens) + len(one.guesses),
            )
            for i, one in enumerate(active)
            if i not in bad
        ]
        sampled = iter(self._sample(draws) if draws else [])
        drawn: list[int | None] = []
        for i, one in enumerate(active):
            token = None if i in bad else next(sampled).token
            if token is None or token == NO_TOKEN:
                one.state.is_spoiled |= token is None
                drawn.append(None)
            else:
                one.guesses.append(token)
                drawn.append(token)
        return drawn

    def _compute(
        self, parts: Sequence[tuple[DraftRun, int]], *, guesses: bool, behind: Sequence[Sequence[int]] = ()
    ) -> tuple[int, ...]:
        """Computes the next rows of each run; `behind` are guesses that follow its known tokens.

        Returns the indexes of runs with a row that is not finite, which it has nothing of afterwards.
        """
        segments: list[Segment] = []
        tokens: list[int] = []
        news: list[list[int]] = []
        for i, (state, rows) in enumerate(parts):
            at = len(state.tokens)
            new = list(state.run.tokens[at : at + rows])
            if behind:
                new += behind[i][max(0, at - len(state.run.tokens)) :]
            segments.append(Segment(rows=len(new), first_position=at, pages=state.pages))
            tokens += new
            news.append(new)
        bad = self._call(segments, tokens, guesses=guesses)
        for i, ((state, _), new) in enumerate(zip(parts, news, strict=True)):
            if i in bad:
                state.is_spoiled = True
            else:
                state.tokens += new
        return bad

    def _call(self, segments: list[Segment], tokens: list[int], *, guesses: bool) -> tuple[int, ...]:
        """Runs the model on rows, and measures that. Keeps the logits of each segment's last row if it `guesses`."""
        ends = np.cumsum([segment.rows for segment in segments])
        # A row of logits costs little, and a program without any would be another one to record.
        wanted = (ends - 1).tolist() if guesses else [int(ends[-1]) - 1]
        began = self._clock()
        output = self._executor.run(Batch(segments=segments, tokens=np.array(tokens, np.int32), wanted=wanted))
        seconds = self._clock() - began
        rows = len(tokens)
        self.cost = observed(
            self.cost, decode_tokens=rows if guesses else 0, prompt_tokens=0 if guesses else rows, seconds=seconds
        )
        if seconds > LONGEST_CALL_S:
            self._long_calls += 1
            if self._long_calls >= LONG_CALLS:
                raise ExecutionError(
                    f"{self._long_calls} calls took longer than {LONGEST_CALL_S} s, the last one {seconds:.2f} s"
                )
        assert output.logits is not None, "a whole model gives logits"
        self._logits = output.logits
        return output.not_finite
