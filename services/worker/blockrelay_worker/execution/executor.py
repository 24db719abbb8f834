"""What runs a stage: the seam between the engine and whatever computes.

An implementation is a folder beside this file, and an entry in `loader`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from blockrelay.protocol.capabilities import Capabilities
from blockrelay_worker.execution.batch import Batch, StageOutput
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

        Any thread may call it for pages that nobody else reads or writes meanwhile.
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
        bit if it is exact. Writes the pages that the segments name and no other. A row that is not finite is reported,
        not raised. ExecutionError (naming the block) when a block fails as a whole or the batch makes no sense; then
        the pages hold rubbish from each segment's first position on, and the same batch may be run again.
        """
        ...

    def close(self) -> None:
        """Give back what it holds. It is useless afterwards."""
        ...
