"""The KV state of one run on one stage: its pages, and the number of tokens whose KV is computed in them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from blockrelay_worker.kernels.specification import PAGE
from blockrelay_worker.runs.kv_load import KvLoad


@dataclass(slots=True, eq=False)
class KvState:
    """The KV pages of a run, and how far they are computed.

    The first `computed` tokens have their KV in `pages`, among them all tokens of published pages. (A stage with the
    head alone has no KV, and may have tokens computed without a page.)
    """

    pages: list[int] = field(default_factory=list[int])
    """Indexes of the run's pages in the pool, in token order."""
    hashes: list[bytes] = field(default_factory=list[bytes])
    """Names (block hashes) of the leading full pages, as far as they were needed."""
    local_hashes: list[bytes] = field(default_factory=list[bytes])
    """Names under which other requests find leading pages in this worker's pool alone."""
    published: int = 0
    """Number of leading pages that are published or came from the prefix cache: they are never written again."""
    shared: int = 0
    """Number of leading pages that have local names too."""
    loading: KvLoad | None = None
    """The page store's load into the last pages. While it runs, nothing is computed."""
    searched: bool = False
    """The prefix cache was searched."""
    cached: int = 0
    """Number of tokens that were reused instead of computed when the run came."""
    preemptions: int = 0
    """How often the run lost its pages to an older run."""
    held: int = 0
    """Number of leading pages that the page store holds for a preempted run, until it goes on or ends."""
    _computed: int = 0

    @property
    def computed(self) -> int:
        """Number of leading tokens whose KV is computed."""
        return self._computed

    def advance_to(self, computed: int) -> None:
        """Records that the first `computed` tokens are computed: no fewer than before, no more than `pages` hold."""
        assert computed >= self._computed, f"{computed} tokens computed, which were {self._computed} already"
        self._set(computed)

    def rewind(self, computed: int) -> None:
        """Keeps only the first `computed` tokens as computed; those behind were wrong drafts, or are recomputed.

        `computed` is no more than before, and no less than the published pages hold.
        """
        assert computed <= self._computed, f"only {self._computed} tokens are computed, not {computed}"
        if computed < self._computed:
            self._set(computed)

    def attach(self, pages: list[int], shared: int = 0) -> None:
        """Takes over full pages from the prefix cache, of which the first `shared` have local names.

        The run must have no pages yet. The pages count as computed and published.
        """
        assert not self.pages and self._computed == 0, "only a run without pages adopts some"
        self.pages, self.published, self.shared = pages, len(pages), shared
        self._set(self.published * PAGE)

    def attach_more(self, pages: Sequence[int], *, shared: bool) -> None:
        """Takes over the next full pages from the prefix cache; `shared`: they have local names, as all before them.

        All computed tokens must be in published pages, and no load may be under way.
        """
        assert self.loading is None and self.takes_pages, "only a run without rows of its own adopts more pages"
        self.pages += pages
        self.published += len(pages)
        self.shared = self.published if shared else self.shared
        self._set(self.published * PAGE)

    @property
    def takes_pages(self) -> bool:
        """Nothing was computed behind the published pages, so that more pages may follow them."""
        return len(self.pages) == self.published and self._computed == self.published * PAGE

    def attach_partial(self, page: int, tokens: int) -> None:
        """Appends a partial page from the prefix cache with the next `tokens` tokens, which this run completes.

        All pages before it must be full and computed, and 0 < `tokens` < PAGE.
        """
        assert self._computed == len(self.pages) * PAGE and 0 < tokens < PAGE
        self.pages.append(page)
        self._set(self._computed + tokens)

    def count_reused(self, computed: int) -> None:
        """Counts the first `computed` tokens as reused, on a stage that has no KV. None may be computed yet."""
        assert not self.pages and self._computed == 0, "only a run without pages adopts some"
        self._computed = self.cached = computed

    def wait_for(self, load: KvLoad) -> None:
        """Appends the pages of a load. The page store writes into them until `loaded` is called.

        No other load may be under way, and all computed tokens must be in published pages.
        """
        assert self.loading is None and self._computed == self.published * PAGE
        self.pages += load.pages
        self.loading = load

    def loaded(self, count: int) -> list[int]:
        """Ends the load: its first `count` pages were filled. Returns the others, which the caller frees.

        Filled pages count as computed, and the full ones as published. There must be a load under way.
        """
        assert self.loading is not None and count <= len(self.loading.pages)
        rest = self.pages[self.published + count :]
        del self.pages[self.published + count :]
        begun = self.loading.partial_tokens if count == len(self.loading.pages) else 0
        self.loading = None
        self.published += count - (begun > 0)
        self._set(self.published * PAGE + begun)
        return rest

    def mark_published(self, pages: int, shared: int = 0) -> None:
        """Records that the first `pages` pages are full and published, the first `shared` with local names too.

        Both numbers replace the former ones. All tokens of these pages must be computed.
        """
        self.published, self.shared = pages, shared
        self._set(self._computed)

    def distrust(self, tokens: int) -> range:
        """Drops the KV behind the first `tokens` tokens, which is wrong.

        Returns the indexes in `pages` of pages that were published and are no longer.
        """
        full = tokens // PAGE
        spoiled = range(full, max(full, self.published))
        self.published, self.shared = min(self.published, full), min(self.shared, full)
        self.rewind(min(self._computed, tokens))
        return spoiled

    def release(self) -> tuple[Sequence[int], KvLoad | None]:
        """Takes all pages from the run, with what is computed in them; hashes, `searched` and counts stay.

        Returns the pages to free, and a load under way, which keeps its pages until its end.
        """
        pages, load = self.pages, self.loading
        if load is not None:
            del pages[len(pages) - len(load.pages) :]
        self.pages, self.published, self.shared, self.loading = [], 0, 0, None
        self._computed = 0
        return pages, load

    def _set(self, computed: int) -> None:
        self._computed = computed
        assert self.published * PAGE <= computed, "a published page is not computed"
        assert computed <= len(self.pages) * PAGE, "tokens are computed that no page holds"
