"""What the draft model has of each run: KV pages of its own, the tokens in them, and guesses not judged yet."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.execution.page_pool import PagePool
from blockrelay_worker.runs.run import Run
from blockrelay_worker.sampling.prompt_lookup import right_drafts


@dataclass(slots=True, eq=False)
class DraftRun:
    """The draft model's state of one run."""

    run: Run
    pages: list[int] = field(default_factory=list[int])
    """Indexes of its KV pages in the draft model's pool."""
    tokens: list[int] = field(default_factory=list[int])
    """The tokens whose KV is in the pages: first those of the run, then perhaps guesses."""
    certain: int = 0
    """Number of leading `tokens` that are known to be the run's."""
    guessed: tuple[int, ...] = ()
    """The guesses of the last step, until they are judged."""
    known: int = 0
    """Number of tokens that the run had when these were guessed."""
    is_spoiled: bool = False
    """The draft model made NaN or infinity of its tokens: it guesses no more for this run."""

    @property
    def missing(self) -> int:
        """Number of the run's tokens that must be computed before the next guess; at least 1 after `judge`."""
        return len(self.run.tokens) - len(self.tokens)

    def judge(self) -> tuple[int, int]:
        """Compares the guesses with the tokens that the run got since, and drops KV of wrong ones.

        Returns the number of right guesses, and of those that were looked at: the right ones and the first wrong one.
        (0, 0) if there is nothing to judge yet.
        """
        known = self.run.tokens
        right = judged = 0
        if self.guessed and len(known) > self.known:
            right = right_drafts(self.guessed, [*known[self.known :], -1])
            judged = min(len(self.guessed), right + 1, len(known) - self.known)
            self.guessed = ()
        end = min(len(self.tokens), len(known) - 1)
        while self.certain < end and self.tokens[self.certain] == known[self.certain]:
            self.certain += 1
        if not self.guessed:
            del self.tokens[self.certain :]
        return right, judged

    def forget_guesses(self) -> None:
        """Drops guesses that no step has verified, with their KV."""
        self.guessed = ()
        self.judge()


class DraftRuns:
    """The states of all runs, and the pages that they hold in the draft model's pool. One thread uses it."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._runs: dict[str, DraftRun] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def of(self, run: Run) -> DraftRun:
        """Returns the state of a run; a new one if it has none."""
        state = self._runs.get(run.request_id)
        if state is None or state.run is not run:
            self._drop(run.request_id)
            state = self._runs[run.request_id] = DraftRun(run)
        return state

    def look(self, runs: Sequence[Run]) -> tuple[int, int]:
        """Judges all guesses, and frees the pages of runs that are gone or have lost their own pages.

        Returns the sums of `DraftRun.judge`.
        """
        if not self._runs:
            return 0, 0
        here = {run.request_id: run for run in runs}
        right = judged = 0
        for request_id, state in list(self._runs.items()):
            verdict = state.judge()
            right, judged = right + verdict[0], judged + verdict[1]
            if here.get(request_id) is not state.run or not state.run.pages:
                self._drop(request_id)
        return right, judged

    def grow(self, state: DraftRun, tokens: int) -> bool:
        """Gives a run pages for its first `tokens` tokens. False, changing nothing, if too few pages are free."""
        lacking = pages_for(tokens) - len(state.pages)
        if lacking > self._pool.free_pages:
            return False
        if lacking > 0:
            state.pages += self._pool.allocate(lacking)
        return True

    def clear(self) -> None:
        """Forgets all runs and frees their pages."""
        for request_id in list(self._runs):
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        state = self._runs.pop(request_id, None)
        if state is not None:
            self._pool.free(state.pages)
