"""What runs a stage: the seam between the engine and whatever computes.

An implementation is a folder beside this file, and an entry in `loader`.

One that is not exact (`Capabilities.exact`) promises numbers where an exact one promises bits. What floats of 32 bits
make of a row differs with the batch around it, with the chunks that came before and between devices, in the last few
digits: of logits up to 16, by 1e-5. Its numerics id is its own, and names whatever decides how it computes, so that
its pages and its tokens are never taken for another's. A page is in the layout's type, which may be narrower than
what it computes with (float16 of a folder whose rows are quantised): then keys and values round once as they leave, and
who goes on from such a page differs by that rounding from who has never let it go.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from blockrelay.protocol.capabilities import Capabilities
from blockrelay_worker.execution.batch import Batch, BlockFault, StageOutput
from blockrelay_worker.execution.page_layout import PageLayout
from blockrelay_worker.execution.page_pool import PagePool

#: Of each layer of the stage the keys [kv_heads, head_dim, 16] and the values [kv_heads, 16, head_dim] of one page, in
#: the layout's dtype.
PageContent = Sequence[tuple[NDArray[Any], NDArray[Any]]]


class PageOwner(Protocol):
    """Has the KV pages of a stage: whose they are (`pool`), and what is in them."""

    @property
    def layout(self) -> PageLayout: ...

    @property
    def pool(self) -> PagePool:
        """The bookkeeping of the pages, which the engine leads."""
        ...

    def export_pages(self, pages: Sequence[int]) -> list[PageContent]:
        """What is in `pages`, perhaps as views of the pages themselves: copy what must last.

        Any thread may call it, also while `run` writes other pages. Who does not own the pages asks the pool's
        `generations` afterwards whether they were still the same.
        """
        ...

    def import_pages(self, pages: Sequence[int], contents: Sequence[PageContent]) -> None:
        """Write what another executor of the same blocks and numerics id has exported.

        The next rows are then what they would have been there: the same bits if it is exact. Any thread may call it
        for pages that nobody else reads or writes meanwhile.
        """
        ...


class Executor(PageOwner, Protocol):
    """Consecutive blocks of one model, loaded and verified. But for pages, one thread uses it."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do, for ever; `numerics_id` and `exact` are in there."""
        ...

    @property
    def details(self) -> Mapping[str, str]:
        """How it computes, for logs; never for decisions about numbers."""
        ...

    @property
    def usable(self) -> bool:
        """Not once the device that it was on is lost: then it has to be loaded anew."""
        ...

    @property
    def takes_tokens(self) -> bool:
        """It has block 1."""
        ...

    @property
    def gives_logits(self) -> bool:
        """It has the last block."""
        ...

    def run(self, batch: Batch) -> StageOutput:
        """Run all blocks on a batch within its capabilities.

        Deterministic: a row's result depends on the tokens of its request up to that row and on nothing else, bit by
        bit if it is exact, but for rounding if not. What other requests, or earlier ones, left behind the last row of a
        page never shows. Writes the pages that the segments name and no other. A row that is not finite is reported,
        not raised. ExecutionError (naming the block) when a block fails as a whole or the batch makes no sense; then
        the pages hold rubbish from each segment's first position on, and the same batch may be run again: after
        DeviceFailed with less in it, after DeviceLost nowhere here.
        """
        ...

    def first_not_finite(self, batch: Batch) -> BlockFault | None:
        """The block that made the rows of `batch` NaN or infinite, found by running one block after the other.

        Takes what `run` takes, writes the same pages and raises the same; None when every block gives finite rows.
        For requests that have failed: it takes longer than `run`.
        """
        ...

    def close(self) -> None:
        """Give back what it holds. It is useless afterwards."""
        ...
