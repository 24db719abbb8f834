"""The run: one attempt at a request, as the stage of this worker sees it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Histogram

from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.text.grammars import GrammarState
from blockrelay_worker.kernels.specification import PAGE
from blockrelay_worker.policy import SCORED_ROWS
from blockrelay_worker.runs.kv_state import KvState
from blockrelay_worker.sampling.logit_changes import TokenCounts
from blockrelay_worker.sampling.prompt_lookup import Drafter, KnownTokens, right_drafts
from blockrelay_worker.sampling.prompt_scores import PromptScores
from blockrelay_worker.sampling.stop_conditions import Progress

#: Batches of a run whose block seconds are summed at a time.
SUMMED_TOGETHER = 64


@dataclass(slots=True, eq=False)
class FirstStageState:
    """The part of a run's state that the first stage alone has: its drafts and the time of its CLAIM."""

    drafter: Drafter | None = None
    """Makes the drafts; None until the first attempt."""
    drafts: tuple[int, ...] = ()
    """Drafts on their way through the later stages."""
    by_look_up: bool = True
    """The drafts of the last step were found in the run's own tokens, and neither guessed nor forced by a grammar."""
    grammar: GrammarState | None = None
    """What the text follows; None: anything."""
    claimed: float | None = field(default_factory=time.monotonic)
    """When the run was claimed, in seconds of the monotonic clock; None after its first token."""

    def judge(self, drafted: int, accepted: int) -> None:
        """Tells who looked the drafts up how many of them were right; a draft model learns it in its own way."""
        if self.drafter is not None and self.by_look_up:
            self.drafter.verdict(drafted, accepted)

    def token_came(self, prefill_time: Histogram) -> None:
        """Observes the seconds since CLAIM at the run's first token; later calls do nothing."""
        since, self.claimed = self.claimed, None
        if since is not None:
            prefill_time.observe(time.monotonic() - since)


@dataclass(slots=True, eq=False)
class LaterStageState:
    """The part of a run's state that came from the stage before."""

    expected: int = 0
    """Sequence number of the next forward message, from 0."""
    block_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds that each block of the stages before took for the rows that are here now."""
    gpu_blocks: tuple[str, ...] = ()
    """Names of the blocks of earlier stages that ran on a GPU."""


@dataclass(slots=True, kw_only=True, eq=False)
class LastStageState:
    """The part of a run's state that the last stage alone has: its end, its commits and its times."""

    progress: Progress | None = None
    """Decides where the request ends; None for a tensor step, which collects `logits`."""
    counts: TokenCounts | None = None
    """Counts the tokens of a request that changes logits; None before its first draw."""
    scores: PromptScores | None = None
    """Scores the tokens of the prompt; None for a request that does not ask for their log probabilities."""
    committed: int = 0
    """Tokens that were handed to COMMIT."""
    known_before: int | None = None
    """Tokens that a re-run began with, until its first commit; None for any other run."""
    logits: list[NDArray[np.float32]] = field(default_factory=list[NDArray[np.float32]])
    """Logits of a tensor step so far, each [tokens, vocab]."""
    sessions: Mapping[str, float] = field(default_factory=dict[str, float])
    """Figures about ONNX Runtime sessions from the last step (`StageOutput.sessions`)."""
    _batches: list[Mapping[str, float]] = field(default_factory=list[Mapping[str, float]])  # not in the sums yet
    _sums: dict[str, float] = field(default_factory=dict[str, float])

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        """Adds the seconds that each block spent on a batch with tokens of this run. `seconds` must not change."""
        if seconds:
            self._batches.append(seconds)  # summed now and then: all requests wait for the work between two steps
            if len(self._batches) == SUMMED_TOGETHER:
                self.block_seconds()

    def block_seconds(self) -> dict[str, float]:
        """Returns the seconds of each block, summed over the run. Later calls change this dict."""
        for seconds in self._batches:
            for block, value in seconds.items():
                self._sums[block] = self._sums.get(block, 0.0) + value
        self._batches.clear()
        return self._sums


@dataclass(slots=True, eq=False)
class RunTrace:
    """The trace of a run on this stage, for a request that asks for one."""

    run: int
    """Number of the run among those of its request, from 1."""
    ready_ns: int
    """Since when the next rows can be computed here, in nanoseconds of the monotonic clock."""
    steps: int = 0
    """Number of steps that were reported."""


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Run:
    """One attempt at a request, as this worker's stage sees it.

    `tokens` are all known ones, prompt first; only this class changes them. 0 <= computed <= len(tokens). In the
    first stage tokens wait to be computed while computed < len(tokens); later stages receive the tokens with their
    rows. A run has either `first` or `later` state, `last` state in the last stage, and a `trace` if its request asks
    for one.
    """

    request_id: str
    """The request's id."""
    run_id: str
    """The run's id: a random nonce."""
    route: tuple[str, ...]
    """The id of the worker of each stage."""
    body: RequestBody
    params: SamplingParams
    seed: int
    context: int
    """The model's maximum number of tokens, prompt included."""
    quarantined_until: int = 0
    """Tokens before this position are computed alone: the request may have killed workers."""
    reusable_limit: int | None = None
    """Leading tokens, at most, whose KV pages may be reused instead of computed; None: no limit."""
    private: bool = False
    """KV pages are not decided by the tokens alone: only runs of the request and steps of its session share them."""
    reruns: int = 0
    """Runs of its request before this one."""
    may_draft: bool = True
    """Drafts may be computed in one batch with its tokens."""
    deadline: float | None = None
    """When the first stage ends the request, in seconds of the monotonic clock; None: never."""

    kv: KvState = field(default_factory=KvState)
    first: FirstStageState | None = None
    later: LaterStageState | None = None
    last: LastStageState | None = None
    trace: RunTrace | None = None
    ended: bool = False
    """The last token is chosen; only its COMMIT is outstanding."""
    last_step: int = 0
    """Number of the step that last computed tokens of this run."""
    sent: int = 0
    """Number of forward messages of this run to the next stage."""
    known: InitVar[Sequence[int]]
    """The tokens that are known when the run begins here, prompt first."""
    _tokens: list[int] = field(init=False)

    def __post_init__(self, known: Sequence[int]) -> None:
        self._tokens = list(known)

    # --- what it is ---

    @property
    def given_pages(self) -> int:
        """Number of leading full pages whose KV the client supplied."""
        return self.body.kv_given // PAGE

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the prompt."""
        return int(self.body.prompt.size)

    def is_overdue(self, now: float) -> bool:
        """True if the deadline has passed at `now` (monotonic seconds)."""
        return self.deadline is not None and now > self.deadline

    def wants_logits(self, position: int) -> bool:
        """True if the request asks for the logits at `position`, apart from those that choose the next token."""
        return self.body.logits == "all" and position >= self.body.prior

    @property
    def block_seconds_before(self) -> Mapping[str, float]:
        """Seconds of each block of the earlier stages, for the rows that are here now."""
        return {} if self.later is None else self.later.block_seconds

    @property
    def gpu_blocks_before(self) -> tuple[str, ...]:
        """Names of the blocks of earlier stages that ran on a GPU."""
        return () if self.later is None else self.later.gpu_blocks

    # --- how far it is ---

    @property
    def tokens(self) -> Sequence[int]:
        """The known tokens, prompt first. A view that later calls change: read it at once."""
        return self._tokens

    @property
    def pages(self) -> list[int]:
        """Indexes in the pool of the run's KV pages, in token order."""
        return self.kv.pages

    @property
    def computed(self) -> int:
        """Number of leading tokens whose KV is computed."""
        return self.kv.computed

    @property
    def missing(self) -> int:
        """Number of tokens that can be computed now.

        For the first stage. It is 0 after the end and while pages are loaded.
        """
        return 0 if self.ended or self.kv.loading else len(self._tokens) - self.kv.computed

    @property
    def step_tokens(self) -> int:
        """Number of tokens that one step may compute now: `missing`, or fewer while the prompt's tokens are scored."""
        scores = self.params.prompt_logprobs is not None and self.kv.computed < self.prompt_length - 1
        return min(self.missing, SCORED_ROWS) if scores else self.missing

    @property
    def quarantined(self) -> bool:
        """True if the next tokens must be computed alone, in quarantine."""
        return self.kv.computed < self.quarantined_until

    @property
    def is_decoding(self) -> bool:
        """True if prefill is done and the request goes on: at most one known token is not computed."""
        return self.missing <= 1 and not self.ended and not self.kv.loading

    @property
    def reusable(self) -> int:
        """Number of leading tokens whose KV may be reused instead of computed, since their logits are not wanted."""
        before_last = len(self._tokens) - 1
        known = min(before_last, self.body.prior) if self.body.logits == "all" else before_last
        if self.params.prompt_logprobs is not None:
            scores = None if self.last is None else self.last.scores
            if scores is None:
                known = 0  # the last stage, elsewhere, needs every row
            elif not scores.complete:
                known = min(known, scores.known)
        limit = self.reusable_limit
        return known if limit is None else min(known, limit)

    # --- what changes its tokens, and how many are computed ---

    def tokens_computed(self, end: int) -> None:
        """Records that a step has computed the tokens before position `end`."""
        self.kv.advance_to(end)
        self._check()

    def learn(self, tokens: Sequence[int]) -> None:
        """Appends committed tokens (first of several stages). Right drafts among them are computed already."""
        if not tokens:
            return
        assert self.first is not None
        accepted = right_drafts(self.first.drafts, tokens)
        self.first.judge(len(self.first.drafts), accepted)
        self._tokens += tokens
        self.kv.advance_to(self.kv.computed + accepted)
        self.first.drafts = ()
        self._keep_nothing()
        self._check()

    def receive(self, position: int, tokens: Sequence[int]) -> None:
        """Takes the tokens whose rows arrived (later stage); they replace all tokens from `position` on.

        `position` must not be beyond `computed`, nor in a published page: the caller checks that before. Raises
        AssertionError if it is.
        """
        assert position <= self.kv.computed <= len(self._tokens), "rows before these are missing"
        self.kv.rewind(position)
        self._tokens[position:] = tokens

    def forget_from(self, position: int) -> None:
        """Drops the tokens from `position` on: drafts, or tokens that a later stage receives with their rows."""
        self.kv.rewind(min(self.kv.computed, position))
        del self._tokens[position:]

    def commit(self, tokens: Sequence[int]) -> None:
        """Appends chosen tokens (last stage). All but the last one are computed, as drafts that were right.

        Without a KV cache all tokens count as not computed afterwards.
        """
        assert self.last is not None
        self._tokens += tokens
        self.last.committed += len(tokens)
        self.kv.advance_to(len(self._tokens) - 1)
        self._keep_nothing()

    def _keep_nothing(self) -> None:
        """Marks all tokens as not computed if the request uses no KV cache."""
        if not self.params.use_cache:
            self.kv.rewind(0)

    @property
    def draft_room(self) -> int:
        """Number of draft tokens that may follow the last known token at most.

        0 for tensor steps, without a KV cache, and if drafts could change the bits of other rows.
        """
        if self.body.logits != "none" or not self.params.use_cache or not self.may_draft:
            return 0
        # The token after the last draft must still be wanted, or the draft was computed in vain.
        return max(0, min(self.prompt_length + self.params.max_tokens, self.context) - len(self._tokens) - 1)

    def forced_tokens(self, limit: int) -> list[int]:
        """Returns at most `limit` tokens that must follow the last known one by the request's grammar (first stage)."""
        if self.first is None or self.first.grammar is None or not (room := self.draft_room):
            return []
        self.first.grammar.push(self._tokens[self.prompt_length + self.first.grammar.length :])
        return self.first.grammar.forced(min(limit, room))

    def draft_tokens(self, limit: int) -> list[int]:
        """Returns at most `limit` draft tokens to follow the last known one, looked up in the tokens (first stage)."""
        if not (room := self.draft_room):
            return []
        assert self.first is not None
        if self.first.drafter is None:
            self.first.drafter = Drafter(known=KnownTokens(self.body.prompt))
        return self.first.drafter.draft(self._tokens, min(limit, room))

    def _check(self) -> None:
        assert self.kv.computed <= len(self._tokens), "more is computed than is known"
