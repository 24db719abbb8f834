"""The interface between the engine and the code that computes a stage.

An implementation is a folder beside this file, and an entry in `loader`.

An exact executor (`Capabilities.exact`) always gives the same bits; one that is not exact gives close numbers. Float32
results of a row then differ in the last few digits with the batch around it, with the chunks before it and between
devices: logits up to 16 differ by 1e-5. Such an executor has a numerics id of its own, which names everything that
decides how it computes, so that its KV pages and tokens are never mixed with another's. A page is stored in the
layout's dtype, which may be narrower than the arithmetic (float16 for a folder with quantised rows). Keys and values
are then rounded once on export, and a run that continues from an exported page differs by that rounding.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from blockrelay.protocol.capabilities import Capabilities
from blockrelay_worker.execution.batch import Batch, BlockFault, StageOutput
from blockrelay_worker.execution.page_layout import PageLayout
from blockrelay_worker.execution.page_pool import PagePool

#: One KV page: keys [kv_heads, head_dim, 16] and values [kv_heads, 16, head_dim] of each layer of the stage, in the
#: layout's dtype.
PageContent = Sequence[tuple[NDArray[Any], NDArray[Any]]]


class PageOwner(Protocol):
    """Holder of the KV pages of a stage: their accounting (`pool`) and their contents."""

    @property
    def layout(self) -> PageLayout: ...

    @property
    def pool(self) -> PagePool:
        """The accounting of the pages. Only the engine's thread uses it."""
        ...

    def export_pages(self, pages: Sequence[int]) -> list[PageContent]:
        """Returns the contents of `pages`, perhaps as views of the pages themselves: copy what must last.

        Any thread may call it, also while `run` writes other pages. A caller that does not own the pages compares the
        pool's `generations` from before and after: a page whose number changed was reused meanwhile. Raises
        ExecutionError if a device in a process of its own fails; inside that process, what ONNX Runtime raises.
        """
        ...

    def import_pages(self, pages: Sequence[int], contents: Sequence[PageContent]) -> None:
        """Writes pages that another executor of the same blocks and numerics id has exported.

        The next positions then come out as they would have there: with the same bits if it is exact. Any thread may
        call it, for pages that no other thread reads or writes meanwhile. Raises as `export_pages` does.
        """
        ...


class Executor(PageOwner, Protocol):
    """Consecutive blocks of one model, loaded and verified. One thread uses it, except for exports and imports."""

    @property
    def capabilities(self) -> Capabilities:
        """The executor's abilities, `numerics_id` and `exact` among them. They never change."""
        ...

    @property
    def details(self) -> Mapping[str, str]:
        """Names of the kernels and backends that compute, for logs only: no decision about numbers may use them."""
        ...

    @property
    def usable(self) -> bool:
        """False once its device is lost: the stage then has to be loaded again."""
        ...

    @property
    def takes_tokens(self) -> bool:
        """True if it has block 1, so that its input is token ids."""
        ...

    @property
    def gives_logits(self) -> bool:
        """True if it has the last block, so that its output is logits."""
        ...

    def run(self, batch: Batch) -> StageOutput:
        """Runs all blocks on a batch within its capabilities.

        A row's result depends only on the tokens of its request up to that row: bit by bit if the executor is exact,
        up to rounding if not. What earlier requests left behind the last row of a page has no effect. It writes only
        the pages that the segments name. A row that is not finite is reported in the output, not raised.

        Raises ExecutionError, naming the block, when a block fails as a whole or the batch is invalid. The pages then
        hold garbage from each segment's first position on, and the same batch may be run again: after DeviceFailed
        with less in it; after DeviceLost only on another executor.
        """
        ...

    def first_not_finite(self, batch: Batch) -> BlockFault | None:
        """Returns the block that made rows of `batch` NaN or infinite, found by running the blocks one by one.

        Returns None when every block gives finite rows. It writes the same pages and raises the same as `run`, and
        takes longer: it is meant for requests that have failed.
        """
        ...

    def close(self) -> None:
        """Frees memory and sessions. The executor cannot be used afterwards."""
        ...
