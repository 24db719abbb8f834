"""One request at a time through stages in this process: what `blockrelay generate` runs, the reference for services.

It makes the same calls in the same order as a worker does, without queue, batch mates or Redis. Exactness says that
everything else must give these tokens.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import BlockFolderError, RowNotFinite
from blockrelay.failpoints import reach
from blockrelay.protocol.plan import uniform_split
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.fault_injection import SaltedExecutor
from blockrelay_worker.execution.loader import executors_for
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.sampling.sampler import Sampled, sample
from blockrelay_worker.sampling.stop_conditions import FinishReason, Progress, advance

#: Prompt rows per run: the linear layers are at full speed and buffers stay small.
CHUNK_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A finished generation. Times in seconds; `first_token_s` includes the prompt."""

    sampled: tuple[Sampled, ...]
    finish_reason: FinishReason
    first_token_s: float
    total_s: float
    block_s: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def tokens(self) -> list[int]:
        """The new tokens, the one that ended the text included."""
        return [one.token for one in self.sampled]


class Pipeline:
    """All stages of a model in one process, for one request at a time."""

    def __init__(self, folder: BlockFolder, *, stages: int, threads: int, tokens: int, salt: str = "") -> None:
        """Room for a request of `tokens` tokens in all. With `salt`, the bits of a worker with that inject_numerics.

        Raises BlockFolderError if there are more stages than blocks or a block gives a wrong known answer.
        """
        if not 1 <= stages <= folder.model.blocks:
            raise BlockFolderError(f"a model of {folder.model.blocks} blocks cannot run in {stages} stages")
        self.folder = folder
        executors = executors_for("cpu", folder, threads=threads)
        self._stages: list[tuple[Executor, list[int]]] = []
        for stage in uniform_split(folder.model.blocks, stages):
            executor = executors.load(folder, stage.first, stage.last, pages=pages_for(tokens))
            if salt:
                executor = SaltedExecutor(executor, salt=salt, vocabulary=folder.model.vocab_size)
            self._stages.append((executor, executor.pool.allocate(pages_for(tokens))))

    def run(
        self, tokens: Sequence[int], first_position: int, *, wanted: bool, seconds: dict[str, float]
    ) -> NDArray[np.float32] | None:
        """Run tokens of the request from `first_position` on; the logits [vocab] of the last one if wanted.

        Adds the time of each block to `seconds`. Raises RowNotFinite.
        """
        reach("worker.before_compute", tokens)
        hidden: NDArray[np.float32] | None = None
        logits: NDArray[np.float32] | None = None
        for executor, pages in self._stages:
            output = executor.run(
                Batch(
                    segments=[Segment(rows=len(tokens), first_position=first_position, pages=pages)],
                    tokens=np.asarray(tokens, np.int32) if executor.takes_tokens else None,
                    hidden=hidden,
                    wanted=[len(tokens) - 1] if wanted and executor.gives_logits else [],
                )
            )
            if output.not_finite:
                raise RowNotFinite(f"a row at positions {first_position} and later is not finite: the model overflowed")
            hidden, logits = output.hidden, output.logits
            for block, spent in output.seconds.items():
                seconds[block] = seconds.get(block, 0.0) + spent
        return logits[0] if wanted and logits is not None else None


def generate(
    pipeline: Pipeline,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    seed: int,
    tokenizer: Tokenizer | None,
    on_token: Callable[[int], None] = lambda token: None,
    known: Sequence[int] = (),
) -> Generated:
    """Run `prompt` and sample until the request ends. `on_token` gets each new token as soon as it is there.

    The prompt must have passed `check_prompt`, and params.max_tokens must be at least 1. `known` tokens follow it
    already, as in the log of a request that runs again, and have not ended it; what is generated stands behind them.
    """
    model = pipeline.folder.model
    progress = Progress(
        params, prompt_tokens=len(prompt), context=model.max_position, eos_ids=model.eos_ids, tokenizer=tokenizer
    )
    started = time.perf_counter()
    seconds: dict[str, float] = {}
    for token in known:
        assert advance(progress, token) is None, "the known tokens end the request"
    before = [*prompt, *known]
    logits = _rows(pipeline, before, 0, seconds)
    sampled: list[Sampled] = []
    first_token_s = 0.0
    while True:
        position = progress.length
        sampled.append(sample(logits, params, seed=seed, position=position))
        token = sampled[-1].token
        first_token_s = first_token_s or time.perf_counter() - started
        reason = advance(progress, token)
        on_token(token)
        if reason is not None:
            break
        before.append(token)
        logits = _rows(pipeline, before, position if params.use_cache else 0, seconds)
    return Generated(
        sampled=tuple(sampled),
        finish_reason=reason,
        first_token_s=first_token_s,
        total_s=time.perf_counter() - started,
        block_s=seconds,
    )


def _rows(pipeline: Pipeline, tokens: Sequence[int], first: int, seconds: dict[str, float]) -> NDArray[np.float32]:
    """Run the tokens from position `first` on, in chunks; the logits of the last one."""
    logits: NDArray[np.float32] | None = None
    for at in range(first, len(tokens), CHUNK_ROWS):
        chunk = tokens[at : at + CHUNK_ROWS]
        logits = pipeline.run(chunk, at, wanted=at + len(chunk) == len(tokens), seconds=seconds)
    assert logits is not None
    return logits
