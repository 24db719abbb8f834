"""Executors with an injected fault, for tests and demonstrations.

`SlowedExecutor` computes slowly. `SaltedExecutor` computes other bits under another numerics id, as after an upgrade.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from blockrelay.protocol.capabilities import Capabilities
from blockrelay.settings import WorkerSettings
from blockrelay_worker.execution.batch import Batch, BlockFault, StageOutput
from blockrelay_worker.execution.executor import Executor, PageContent
from blockrelay_worker.execution.page_layout import PageLayout
from blockrelay_worker.execution.page_pool import PagePool


class WrappingExecutor:
    """Implements `Executor`: passes every call on to another executor. Subclasses override what they change."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    @property
    def layout(self) -> PageLayout:
        return self._executor.layout

    @property
    def pool(self) -> PagePool:
        return self._executor.pool

    @property
    def capabilities(self) -> Capabilities:
        return self._executor.capabilities

    @property
    def details(self) -> Mapping[str, str]:
        return self._executor.details

    @property
    def usable(self) -> bool:
        return self._executor.usable

    @property
    def takes_tokens(self) -> bool:
        return self._executor.takes_tokens

    @property
    def gives_logits(self) -> bool:
        return self._executor.gives_logits

    def run(self, batch: Batch) -> StageOutput:
        return self._executor.run(batch)

    def first_not_finite(self, batch: Batch) -> BlockFault | None:
        return self._executor.first_not_finite(batch)

    def export_pages(self, pages: Sequence[int]) -> list[PageContent]:
        return self._executor.export_pages(pages)

    def import_pages(self, pages: Sequence[int], contents: Sequence[PageContent]) -> None:
        self._executor.import_pages(pages, contents)

    def close(self) -> None:
        self._executor.close()


class SlowedExecutor(WrappingExecutor):
    """Runs at the share `speed` (above 0, at most 1) of the real speed: a slower device with the same bits.

    `StageOutput.seconds` stay those of the real speed.
    """

    def __init__(self, executor: Executor, *, speed: float) -> None:
        super().__init__(executor)
        self._waits = 1 / speed - 1

    def run(self, batch: Batch) -> StageOutput:
        started = time.perf_counter()
        output = super().run(batch)
        time.sleep(self._waits * (time.perf_counter() - started))
        return output


class SaltedExecutor(WrappingExecutor):
    """Computes other bits than the executor that it wraps; a row still depends only on the tokens of its request.

    It reads a quarter of the vocabulary as other tokens, which changes hidden states and KV pages of every stage, and
    adds a fixed number between -1 and 1 to the logit of each token. `salt`, not empty, seeds both choices. `vocabulary`
    is the number of token ids. It ignores `Batch.needs`: all rows of logits are whole.
    """

    def __init__(self, executor: Executor, *, salt: str, vocabulary: int) -> None:
        super().__init__(executor)
        own = executor.capabilities
        self._capabilities = replace(own, numerics_id=salted_id(own.numerics_id, salt))
        seed = int.from_bytes(hashlib.sha256(salt.encode()).digest()[:8], "little")
        random = np.random.Generator(np.random.Philox(seed))
        ids = np.arange(vocabulary, dtype=np.int32)
        self._read_as = np.where(random.random(vocabulary) < 0.25, random.permutation(ids), ids)
        self._added = random.uniform(-1, 1, vocabulary).astype(np.float32)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def run(self, batch: Batch) -> StageOutput:
        output = super().run(self._read(replace(batch, needs=())))  # whole rows: the largest logits will be others
        if output.logits is not None:
            output.logits[...] += self._added  # in place: the buffer is the executor's until the next run
        return output

    def first_not_finite(self, batch: Batch) -> BlockFault | None:
        return super().first_not_finite(self._read(batch))

    def _read(self, batch: Batch) -> Batch:
        return batch if batch.tokens is None else replace(batch, tokens=self._read_as[batch.tokens])


def salted_id(numerics: str, salt: str) -> str:
    """Returns the numerics id of a `SaltedExecutor` over one with the id `numerics`; the same id for an empty salt."""
    return f"{numerics}-{salt}" if salt else numerics


def with_faults(executor: Executor, settings: WorkerSettings, *, vocabulary: int) -> Executor:
    """Wraps a verified executor in the faults that the settings ask for. `vocabulary`: tokens of the model."""
    if salt := settings.inject_numerics:
        executor = SaltedExecutor(executor, salt=salt, vocabulary=vocabulary)
    if settings.inject_speed < 1:
        executor = SlowedExecutor(executor, speed=settings.inject_speed)
    return executor
