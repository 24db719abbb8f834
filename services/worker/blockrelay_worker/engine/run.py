"""One request on this worker, while it runs here."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Histogram

from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_worker.kernels.specification import PAGE
from blockrelay_worker.kv.state import KvState
from blockrelay_worker.sampling.prompt_lookup import Drafter, KnownTokens, right_drafts
from blockrelay_worker.sampling.stop_conditions import Progress
from blockrelay_worker.transport.stage_spans import RunTrace

#: Batches of a run whose seconds are added up at a time.
SUMMED_TOGETHER = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """What a run is, from its beginning to its end.

    `context` tokens are all that the model can hold. Rows before position `quarantined_until` are computed alone (a
    request that may have killed workers). Pages of so many leading tokens as `reusable_limit` says may be found instead
    of computed (None: any number). Those of a `private` one are found by other runs of the same request alone: they are
    not what their tokens decide. `guessing`: rows of guesses may stand beside its own. `deadline` on the monotonic
    clock; the first stage's to keep.
    """

    request: str
    id: str
    route: tuple[str, ...]
    body: RequestBody
    params: SamplingParams
    seed: int
    context: int
    quarantined_until: int = 0
    reusable_limit: int | None = None
    private: bool = False
    guessing: bool = True
    deadline: float | None = None


@dataclass(slots=True, eq=False)
class FirstStageState:
    """Guesses: who makes them, once that was tried, and those on their way through the other stages. `claimed`: when,
    until its first token has come (monotonic)."""

    drafter: Drafter | None = None
    drafts: tuple[int, ...] = ()
    claimed: float | None = field(default_factory=time.monotonic)

    def token_came(self, prefill_time: Histogram) -> None:
        """Tell the histogram the seconds since CLAIM, at the first token alone."""
        since, self.claimed = self.claimed, None
        if since is not None:
            prefill_time.observe(time.monotonic() - since)


@dataclass(slots=True, eq=False)
class LaterStageState:
    """What came from the stage before: the number of the `expected` message, and of the rows here now the seconds of
    the blocks before, and which of these ran on a GPU."""

    expected: int = 0
    block_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    gpu_blocks: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True, eq=False)
class LastStageState:
    """What becomes of rows: `progress` decides the end (None for a tensor step, which collects `logits`), `committed`
    counts tokens handed to COMMIT. Of a re-run that has committed nothing yet `known_before` tokens were known when it
    came (None: of any other). `sessions` as the last step has told (`StageOutput`)."""

    progress: Progress | None = None
    committed: int = 0
    known_before: int | None = None
    logits: list[NDArray[np.float32]] = field(default_factory=list[NDArray[np.float32]])
    sessions: Mapping[str, float] = field(default_factory=dict[str, float])
    _batches: list[Mapping[str, float]] = field(default_factory=list[Mapping[str, float]])  # not in the sums yet
    _sums: dict[str, float] = field(default_factory=dict[str, float])

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        """What each block spent on a batch with rows of this run; nobody changes it afterwards."""
        if seconds:
            self._batches.append(seconds)  # summed up now and then: between two steps everybody waits
            if len(self._batches) == SUMMED_TOGETHER:
                self.block_seconds()

    def block_seconds(self) -> dict[str, float]:
        """Sums over the run."""
        for seconds in self._batches:
            for block, value in seconds.items():
                self._sums[block] = self._sums.get(block, 0.0) + value
        self._batches.clear()
        return self._sums


class Run:
    """One attempt at a request, as this worker's stage sees it.

    `tokens` are all that are known, prompt first; they are written here alone. 0 <= computed <= len(tokens). In the
    first stage rows are missing while computed < len(tokens); later stages learn the tokens with the rows. A run has
    either a `first` or a `later` state, a `last` one where the stage is the last, and a `trace` if its request asked.
    """

    __slots__ = (
        "_tokens", "ended", "first", "identity", "kv", "last", "last_step", "later", "request", "sent", "trace",
    )  # fmt: skip

    def __init__(
        self,
        identity: RunIdentity,
        tokens: Sequence[int],
        *,
        first: bool,
        last: LastStageState | None = None,
        trace: RunTrace | None = None,
    ) -> None:
        self.identity, self.request = identity, identity.request
        self.kv = KvState()
        self.first = FirstStageState() if first else None
        self.later = None if first else LaterStageState()
        self.last, self.trace = last, trace
        self.ended = False  # the last token is chosen; only its COMMIT is outstanding
        self.last_step = 0  # the step that last computed rows of it
        self.sent = 0  # forward messages of this run to the next stage
        self._tokens = list(tokens)

    # --- what it is ---

    @property
    def id(self) -> str:
        return self.identity.id

    @property
    def route(self) -> tuple[str, ...]:
        return self.identity.route

    @property
    def body(self) -> RequestBody:
        return self.identity.body

    @property
    def params(self) -> SamplingParams:
        return self.identity.params

    @property
    def salt(self) -> str:
        """Runs with another salt share no page with this one."""
        return self.identity.body.salt

    @property
    def session(self) -> str:
        """Of which it is a step; "": of none."""
        return self.identity.body.session

    @property
    def private(self) -> bool:
        """Its pages are not what its tokens decide: runs of the same request share them, and steps of its session."""
        return self.identity.private

    @property
    def given_pages(self) -> int:
        """Of so many leading pages the client has given the KV."""
        return self.body.kv_given // PAGE

    @property
    def prompt_length(self) -> int:
        return int(self.identity.body.prompt.size)

    def is_overdue(self, now: float) -> bool:
        """Whether its deadline has passed at `now`, on the monotonic clock."""
        return self.identity.deadline is not None and now > self.identity.deadline

    def put_off(self, deadline: float) -> None:
        """Redis, whose clock decides, says that there is time left: to be looked at again behind `deadline`."""
        self.identity = replace(self.identity, deadline=deadline)

    def wants_logits(self, position: int) -> bool:
        """Whether the logits of the row at `position` are asked for, the sampling row aside."""
        return self.body.logits == "all" and position >= self.body.prior

    @property
    def block_seconds_before(self) -> Mapping[str, float]:
        """What the stages before spent on the rows that are here now."""
        return {} if self.later is None else self.later.block_seconds

    @property
    def gpu_blocks_before(self) -> tuple[str, ...]:
        """Blocks of the stages before that ran on a GPU."""
        return () if self.later is None else self.later.gpu_blocks

    # --- how far it is ---

    @property
    def tokens(self) -> Sequence[int]:
        """To be read at once: it goes on changing."""
        return self._tokens

    @property
    def pages(self) -> list[int]:
        return self.kv.pages

    @property
    def computed(self) -> int:
        return self.kv.computed

    @property
    def searched(self) -> bool:
        return self.kv.searched

    @property
    def missing(self) -> int:
        """Rows that can be computed now (first stage)."""
        return 0 if self.ended or self.kv.loading else len(self._tokens) - self.kv.computed

    @property
    def quarantined(self) -> bool:
        """Its next rows are computed alone."""
        return self.kv.computed < self.identity.quarantined_until

    @property
    def is_decoding(self) -> bool:
        """Its prompt is computed, and its next token is on its way or can be computed."""
        return self.missing <= 1 and not self.ended and not self.kv.loading

    @property
    def reusable(self) -> int:
        """How many leading tokens need no row of their own, so that their KV may be found instead of computed."""
        before_last = len(self._tokens) - 1
        known = min(before_last, self.body.prior) if self.body.logits == "all" else before_last
        limit = self.identity.reusable_limit
        return known if limit is None else min(known, limit)

    @property
    def limited(self) -> bool:
        """Somebody has said how far the run before it came."""
        return self.identity.reusable_limit is not None

    # --- tokens and rows; everything that changes them ---

    def rows_computed(self, end: int) -> None:
        """A step has computed the rows up to `end`."""
        self.kv.advance_to(end)
        self._check()

    def learn(self, tokens: Sequence[int]) -> None:
        """First of several stages: `tokens` became known. The rows of drafts that were right are computed already."""
        if not tokens:
            return
        assert self.first is not None
        accepted = right_drafts(self.first.drafts, tokens)
        if self.first.drafter is not None:
            self.first.drafter.verdict(len(self.first.drafts), accepted)
        self._tokens += tokens
        self.kv.advance_to(self.kv.computed + accepted)
        self.first.drafts = ()
        self._keep_nothing()
        self._check()

    def receive(self, position: int, tokens: Sequence[int]) -> None:
        """Later stage: rows of these tokens are here. What was known from `position` on were guesses."""
        assert position <= self.kv.computed <= len(self._tokens), "rows before these are missing"
        self.kv.rewind(position)
        self._tokens[position:] = tokens

    def forget_from(self, position: int) -> None:
        """The tokens from `position` on are not known: guesses, or a later stage learns them with their rows."""
        self.kv.rewind(min(self.kv.computed, position))
        del self._tokens[position:]

    def commit(self, tokens: Sequence[int]) -> None:
        """Last stage: `tokens` follow. All rows but the last one's are computed, as known token or right guess."""
        assert self.last is not None
        self._tokens += tokens
        self.last.committed += len(tokens)
        self.kv.advance_to(len(self._tokens) - 1)
        self._keep_nothing()

    def _keep_nothing(self) -> None:
        """Without a cache the next token needs all rows anew."""
        if not self.params.use_cache:
            self.kv.rewind(0)

    def guesses(self, limit: int) -> list[int]:
        """First stage: at most `limit` guesses at the tokens behind the last known one; none for tensor steps, and none
        where the rows of a guess may change what its neighbours come to."""
        if self.body.logits != "none" or not self.params.use_cache or not self.identity.guessing:
            return []
        assert self.first is not None
        if self.first.drafter is None:
            self.first.drafter = Drafter(known=KnownTokens(self.body.prompt))
        # The token after the last draft must still be wanted, or its row was in vain.
        room = min(self.prompt_length + self.params.max_tokens, self.identity.context) - len(self._tokens) - 1
        return self.first.drafter.draft(self._tokens, min(limit, room))

    def _check(self) -> None:
        assert self.kv.computed <= len(self._tokens), "more is computed than is known"
