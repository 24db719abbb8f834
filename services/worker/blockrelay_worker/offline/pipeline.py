"""Runs one request at a time through stages in this process, for `blockrelay generate`: the reference for services.

It makes the same calls in the same order as a worker, without queue, other requests and Redis. In exact precisions
services must give the same tokens. Stages on a device run in the device's process, as a worker's do.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import BlockFolderError, ExecutionError, RowNotFinite
from blockrelay.failpoints import reach
from blockrelay.protocol.plan import CPU, GPU, Device, Stage
from blockrelay.protocol.planned_split import ANY_GPU, equal_parts
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.text.grammars import grammars_of
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.fault_injection import SaltedExecutor
from blockrelay_worker.execution.loader import Executors, executors_for
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.execution.process.executors import DeviceExecutors, Gpu
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.sampling.logit_changes import TokenCounts, changes_of
from blockrelay_worker.sampling.row_sampler import sampler_of
from blockrelay_worker.sampling.sampler import NO_TOKEN, NOTHING_FOLLOWS, Draw, Sampled
from blockrelay_worker.sampling.stop_conditions import FinishReason, Progress, advance

#: Prompt rows per run: the linear layers are at full speed and buffers stay small.
CHUNK_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """One run of one stage: shapes of its input (`taken`) and output (`given`), and its times in seconds.

    `kv_s`: finding the rows' places in the KV pages. `transfer_s`: moving rows in and out, by a copy of the stage
    before's output, or to a device's process and back. `compute_s`: the blocks alone. `total_s`: the whole run, with
    the checks of its rows.
    """

    stage: int
    device_class: Device
    device: str
    blocks: Stage
    taken: tuple[int, ...]
    given: tuple[int, ...]
    kv_s: float
    transfer_s: float
    compute_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStep:
    """One pass through all stages, and the token that it gave. Times in seconds.

    A stage has one run, or several for a long prompt.
    """

    runs: tuple[StageRun, ...]
    token: int
    sampling_s: float
    total_s: float

    @property
    def rows(self) -> int:
        """Number of tokens that went through the model."""
        return sum(run.taken[0] for run in self.runs if run.stage == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A finished generation. Times in seconds; `first_token_s` includes the prompt."""

    sampled: tuple[Sampled, ...]
    finish_reason: FinishReason
    first_token_s: float
    total_s: float
    block_s: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of each block, by its name, over all steps."""

    @property
    def tokens(self) -> list[int]:
        """The new tokens, the one that ended the text included."""
        return [one.token for one in self.sampled]


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A loaded stage, with the KV pages of the request."""

    executor: Executor
    pages: list[int]
    blocks: Stage
    device_class: Device
    device: str


class Pipeline:
    """All stages of a model, for one request at a time."""

    def __init__(
        self,
        folder: BlockFolder,
        *,
        stages: int,
        threads: int,
        tokens: int,
        salt: str = "",
        gpu: Gpu | None = None,
        stage_devices: str = "",
    ) -> None:
        """Loads the stages, with KV pages for a request of `tokens` tokens in all.

        `threads` are those of the CPU kernels. With `salt` the stages compute other bits, the same as a worker whose
        setting `inject_numerics` is this text (for tests). `gpu` runs the stages whose class in `stage_devices` (such
        as `cpu,gpu`) is gpu, all of them without classes; a pipeline with a `gpu` must be closed.

        Raises BlockFolderError unless 1 <= `stages` <= blocks, and if a block gives a wrong known answer. Raises
        UsageError for classes that do not fit the stages, for a device that cannot be used, and for a model of ONNX
        files without `gpu`. Raises DeviceLost or DeviceFailed for a device that may work later, OSError if `gpu.python`
        cannot be started, and on a CPU ExecutionError if ONNX Runtime is needed and has no usable library.
        """
        if not 1 <= stages <= folder.model.blocks:
            raise BlockFolderError(f"a model of {folder.model.blocks} blocks cannot run in {stages} stages")
        self.folder, self._threads = folder, threads
        #: Draws tokens from logits.
        self.sampler = sampler_of(load_kernels(threads))
        self._by_class: dict[Device, Executors] = {}
        self._stages: list[_Loaded] = []
        planned = equal_parts(folder.model.blocks, stages, stage_devices=stage_devices)
        try:
            for blocks, devices in zip(planned.stages, planned.devices, strict=True):
                self._load(blocks, gpu if not devices or ANY_GPU in devices else None, pages_for(tokens), salt)
        except BaseException:
            self.close()
            raise

    @property
    def numerics(self) -> str:
        """The numerics ids of the stages, in order, each once, joined by slashes as in a service's answers."""
        return "/".join(dict.fromkeys(stage.executor.capabilities.numerics_id for stage in self._stages))

    def close(self) -> None:
        """Drops the stages and ends the device's process. The pipeline cannot be used afterwards."""
        for stage in self._stages:
            stage.executor.close()
        self._stages.clear()
        for executors in self._by_class.values():
            if isinstance(executors, DeviceExecutors):
                executors.close()

    def run(
        self,
        tokens: Sequence[int],
        first_position: int,
        *,
        wanted: Sequence[int] | None = None,
        seconds: dict[str, float] | None = None,
        runs: list[StageRun] | None = None,
    ) -> NDArray[np.float32]:
        """Runs `tokens` of the request, from `first_position` on; returns the logits [wanted, vocab] of some of them.

        The tokens before `first_position` must have been run, and no position may be beyond the `tokens` of the
        constructor. `wanted` are indexes in `tokens`; None: the last one. The result is valid until the next run. Adds
        the seconds of each block to `seconds`, by block name, and each stage's run to `runs`. Raises RowNotFinite if
        the model overflows, ExecutionError if a block or a device fails, or no token is allowed to follow.
        """
        rows = [len(tokens) - 1] if wanted is None else wanted
        seconds = {} if seconds is None else seconds
        reach("worker.before_compute", tokens)
        hidden: NDArray[np.float32] | None = None
        logits: NDArray[np.float32] | None = None
        for number, stage in enumerate(self._stages):
            executor, began = stage.executor, time.perf_counter()
            taken = (len(tokens),) if hidden is None else hidden.shape
            output = executor.run(
                Batch(
                    segments=[Segment(rows=len(tokens), first_position=first_position, pages=stage.pages)],
                    tokens=np.asarray(tokens, np.int32) if executor.takes_tokens else None,
                    hidden=hidden,
                    wanted=rows if executor.gives_logits else (),
                )
            )
            total_s = time.perf_counter() - began
            if output.not_finite:
                raise RowNotFinite(f"a row at positions {first_position} and later is not finite: the model overflowed")
            hidden, logits = output.hidden, output.logits
            for block, spent in output.seconds.items():
                seconds[block] = seconds.get(block, 0.0) + spent
            given = hidden if logits is None else logits
            if runs is not None and given is not None:
                runs.append(
                    StageRun(
                        stage=number,
                        device_class=stage.device_class,
                        device=stage.device,
                        blocks=stage.blocks,
                        taken=taken,
                        given=given.shape,
                        kv_s=output.kv_s,
                        transfer_s=output.moved_s,
                        compute_s=sum(output.seconds.values()),
                        total_s=total_s,
                    )
                )
        assert logits is not None, "the last stage gives logits"
        return logits

    def _load(self, blocks: Stage, gpu: Gpu | None, pages: int, salt: str) -> None:
        """Loads a stage, on the device or, without one, on our own kernels."""
        of: Device = CPU if gpu is None else GPU
        if of not in self._by_class:
            self._by_class[of] = executors_for(self.folder, threads=self._threads, gpu=gpu)
        executor: Executor = self._by_class[of].load(self.folder, blocks.first, blocks.last, pages=pages)
        if salt:
            executor = SaltedExecutor(executor, salt=salt, vocabulary=self.folder.model.vocab_size)
        own = executor.pool.allocate(pages)
        self._stages.append(_Loaded(executor, own, blocks, of, "cpu" if gpu is None else gpu.device))


def generate(
    pipeline: Pipeline,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    seed: int,
    tokenizer: Tokenizer | None,
    on_token: Callable[[int], None] = lambda token: None,
    on_step: Callable[[PipelineStep], None] | None = None,
    known: Sequence[int] = (),
) -> Generated:
    """Runs `prompt` and samples until the request ends. Calls `on_token` with each new token, `on_step` with its step.

    The prompt must have passed `check_prompt`, and params.max_tokens must be at least 1. `pipeline` must have been made
    for as many tokens as prompt and params.max_tokens together, or for the whole context. `seed` is used, not
    params.seed. `known` tokens follow the prompt, as in the log of a request that runs again, and have not ended it;
    new tokens come after them. `tokenizer` may be None if the request has no stop strings. Raises RowNotFinite if the
    model overflows, ExecutionError if a block or a device fails.
    """
    model = pipeline.folder.model
    grammars = grammars_of(tokenizer, model) if params.grammar else None
    progress = Progress(
        params,
        prompt=prompt,
        context=model.max_position,
        eos_ids=model.eos_ids,
        tokenizer=tokenizer,
        grammar=None if grammars is None else grammars.follow(params.grammar),
    )
    started = time.perf_counter()
    seconds: dict[str, float] = {}
    for token in known:
        assert advance(progress, token) is None, "the known tokens end the request"
    before = [*prompt, *known]
    counts = TokenCounts(before, len(prompt)) if params.changes_logits else None
    sampled: list[Sampled] = []
    first_token_s, first = 0.0, 0
    while True:
        began, runs = time.perf_counter(), list[StageRun]()
        logits = _rows(pipeline, before, first, seconds, None if on_step is None else runs)
        position, ran = progress.length, time.perf_counter()
        changes = None if counts is None else changes_of(logits, params, counts, before, progress.end_ids)
        masks = [None] if progress.grammar is None else progress.grammar.masks(())
        if not masks:
            raise ExecutionError("nothing can follow by the grammar")
        sampled += pipeline.sampler([Draw(logits, params, seed, position, changes, masks[0])])
        if sampled[-1].token == NO_TOKEN:
            raise ExecutionError(NOTHING_FOLLOWS)
        token, chosen = sampled[-1].token, time.perf_counter()
        first_token_s = first_token_s or chosen - started
        reason = advance(progress, token)
        on_token(token)
        if on_step is not None:
            on_step(PipelineStep(runs=tuple(runs), token=token, sampling_s=chosen - ran, total_s=chosen - began))
        if reason is not None:
            break
        before.append(token)
        if counts is not None:
            counts.add([token])
        first = position if params.use_cache else 0
    return Generated(
        sampled=tuple(sampled),
        finish_reason=reason,
        first_token_s=first_token_s,
        total_s=time.perf_counter() - started,
        block_s=seconds,
    )


def _rows(
    pipeline: Pipeline, tokens: Sequence[int], first: int, seconds: dict[str, float], runs: list[StageRun] | None
) -> NDArray[np.float32]:
    """Runs the tokens from position `first` on, in chunks; returns the logits [vocab] of the last one."""
    logits = np.empty((0, 0), np.float32)
    for at in range(first, len(tokens), CHUNK_ROWS):
        chunk = tokens[at : at + CHUNK_ROWS]
        wanted = None if at + len(chunk) == len(tokens) else ()
        logits = pipeline.run(chunk, at, wanted=wanted, seconds=seconds, runs=runs)
    return logits[0]
