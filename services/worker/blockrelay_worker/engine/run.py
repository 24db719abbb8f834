"""One request on this worker, while it runs here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_worker.kv.store.store import Load
from blockrelay_worker.sampling.prompt_lookup import Drafter, right_drafts
from blockrelay_worker.sampling.stop_conditions import Progress

#: Batches of a run whose seconds are added up at a time.
SUMMED_TOGETHER = 64


@dataclass(slots=True, kw_only=True)
class Run:
    """One attempt at a request, as this worker's stage sees it.

    `names` are the content names of its leading full pages, as far as they were needed. The first `sealed` of `pages`
    are named or found and never written again. With `skip_prefix_cache` it takes no page that it has not computed
    itself. While a tier is `loading` pages for it, nothing of it is computed.

    `tokens` every known token, prompt first; `computed` how many of them have their KV in `pages` of this stage
    (0 <= computed <= len(tokens)). First stage: rows are missing while computed < len(tokens). Later stages learn the
    tokens with the rows. Last stage: `progress` decides the end, `committed` counts tokens handed to COMMIT.
    """

    request: str
    id: str
    route: tuple[str, ...]
    body: RequestBody
    params: SamplingParams
    seed: int
    context: int  # tokens that the model can hold
    tokens: list[int]
    quarantined_until: int = 0  # rows before this position are computed alone (a request that may have killed workers)
    progress: Progress | None = None
    committed: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list[int])
    names: list[bytes] = field(default_factory=list[bytes])
    sealed: int = 0
    loading: Load | None = None
    adopted: bool = False  # known pages were looked for
    skip_prefix_cache: bool = False
    deadline: float | None = None  # first stage: on the monotonic clock
    cached: int = 0  # tokens whose KV was found instead of computed when the run came
    preemptions: int = 0
    sent: int = 0  # forward messages of this run to the next stage
    expected: int = 0  # sequence number of the next forward message from the stage before
    drafter: Drafter | None = None  # first stage, once it has tried to guess
    drafts: tuple[int, ...] = ()  # first of several stages: guesses on their way through the others
    ended: bool = False  # the last token is chosen; only its COMMIT is outstanding
    last_step: int = 0  # the step that last computed rows of it
    batches: list[Mapping[str, float]] = field(default_factory=list[Mapping[str, float]])  # seconds not yet in the sums
    sums: dict[str, float] = field(default_factory=dict[str, float])
    passing: dict[str, float] = field(default_factory=dict[str, float])  # of the rows here now, stages before
    gpu_blocks: tuple[str, ...] = ()  # which of the stages' before ran on a GPU
    logits: list[NDArray[np.float32]] = field(default_factory=list[NDArray[np.float32]])

    @property
    def prompt_length(self) -> int:
        return int(self.body.prompt.size)

    @property
    def salt(self) -> str:
        """Runs with another salt share no page with this one."""
        return self.body.salt

    @property
    def quarantined(self) -> bool:
        """Its next rows are computed alone."""
        return self.computed < self.quarantined_until

    @property
    def is_decoding(self) -> bool:
        """Its prompt is computed, and its next token is on its way or can be computed."""
        return self.missing <= 1 and not self.ended and not self.loading

    @property
    def missing(self) -> int:
        """Rows that can be computed now (first stage)."""
        return 0 if self.ended or self.loading else len(self.tokens) - self.computed

    @property
    def reusable(self) -> int:
        """How many leading tokens need no row of their own, so that their KV may be found instead of computed."""
        before_last = len(self.tokens) - 1
        return min(before_last, self.body.prior) if self.body.logits == "all" else before_last

    def guesses(self, limit: int) -> list[int]:
        """At most `limit` guesses at the tokens behind the last known one; none for tensor steps."""
        if self.body.logits != "none":
            return []
        if self.drafter is None:
            self.drafter = Drafter()
        # The token after the last draft must still be wanted, or its row was in vain.
        room = min(self.prompt_length + self.params.max_tokens, self.context) - len(self.tokens) - 1
        return self.drafter.draft(self.tokens, min(limit, room))

    def learn(self, tokens: Sequence[int]) -> None:
        """Several stages: `tokens` became known. The rows of drafts that were right are computed already."""
        if not tokens:
            return
        accepted = right_drafts(self.drafts, tokens)
        if self.drafter is not None:
            self.drafter.verdict(len(self.drafts), accepted)
        self.tokens += tokens
        self.computed += accepted
        self.drafts = ()

    def wants_logits(self, position: int) -> bool:
        """Whether the logits of the row at `position` are asked for, the sampling row aside."""
        return self.body.logits == "all" and position >= self.body.prior

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        """Last stage: what each block spent on a batch with rows of this run; nobody changes it afterwards."""
        if seconds:
            self.batches.append(seconds)  # summed up now and then: between two steps everybody waits
            if len(self.batches) == SUMMED_TOGETHER:
                self.block_seconds()

    def block_seconds(self) -> dict[str, float]:
        """Last stage: sums over the run."""
        for seconds in self.batches:
            for block, value in seconds.items():
                self.sums[block] = self.sums.get(block, 0.0) + value
        self.batches.clear()
        return self.sums
