"""The KV of one run on one stage: its pages, and how many of its tokens have theirs computed. Only kv/ changes it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from blockrelay_worker.kernels.specification import PAGE
from blockrelay_worker.kv.store.store import Load


@dataclass(slots=True, eq=False)
class KvState:
    """`names` are the content names of the leading full pages, as far as they were needed. The first `sealed` of
    `pages` are named or found, and never written again; the first `shared` of these have `local` names too, if any, by
    which other requests find them in this pool alone. While a tier is `loading` pages, the last ones, nothing is
    computed. `cached` tokens were found instead of computed when the run came.

    The first `computed` tokens have their KV in `pages`: at least those in sealed pages. It is written here alone. (A
    stage of the head alone keeps nothing, and may have tokens computed without a page.)
    """

    pages: list[int] = field(default_factory=list[int])
    names: list[bytes] = field(default_factory=list[bytes])
    local: list[bytes] = field(default_factory=list[bytes])
    sealed: int = 0
    shared: int = 0
    loading: Load | None = None
    searched: bool = False  # known pages were looked for
    cached: int = 0
    preemptions: int = 0
    _computed: int = 0

    @property
    def computed(self) -> int:
        return self._computed

    def advance_to(self, computed: int) -> None:
        """A step has computed tokens up to here."""
        assert computed >= self._computed, f"{computed} tokens computed, which were {self._computed} already"
        self._set(computed)

    def rewind(self, computed: int) -> None:
        """What lies behind is computed again: guesses that were wrong."""
        assert computed <= self._computed, f"only {self._computed} tokens are computed, not {computed}"
        if computed < self._computed:
            self._set(computed)

    def adopt(self, pages: list[int], shared: int = 0) -> None:
        """Begin with pages that hold the first tokens already, of which the first `shared` have local names."""
        assert not self.pages and self._computed == 0, "only a run without pages adopts some"
        self.pages, self.sealed, self.shared = pages, len(pages), shared
        self._set(self.sealed * PAGE)

    def adopt_begun(self, page: int, tokens: int) -> None:
        """Behind full pages, one of the run's own that holds the next `tokens` tokens."""
        assert self._computed == len(self.pages) * PAGE and 0 < tokens < PAGE
        self.pages.append(page)
        self._set(self._computed + tokens)

    def adopt_nothing(self, computed: int) -> None:
        """Begin behind so many tokens, on a stage that keeps no KV and so lacks none."""
        assert not self.pages and self._computed == 0, "only a run without pages adopts some"
        self._computed = self.cached = computed

    def wait_for(self, load: Load) -> None:
        """Take the pages of a load at the end, which somebody else writes until `loaded`."""
        assert self.loading is None and self._computed == self.sealed * PAGE
        self.pages += load.pages
        self.loading = load

    def loaded(self, count: int) -> list[int]:
        """The first `count` pages of the load hold what they should; the others, which are given back."""
        assert self.loading is not None and count <= len(self.loading.pages)
        rest = self.pages[self.sealed + count :]
        del self.pages[self.sealed + count :]
        begun = self.loading.begun if count == len(self.loading.pages) else 0
        self.loading = None
        self.sealed += count - (begun > 0)
        self._set(self.sealed * PAGE + begun)
        return rest

    def seal(self, pages: int, shared: int = 0) -> None:
        """The first `pages` pages are full and named, the first `shared` locally."""
        self.sealed, self.shared = pages, shared
        self._set(self._computed)

    def distrust(self, tokens: int) -> range:
        """What lies behind the first `tokens` tokens was computed wrongly: it is computed again, if at all. The indexes
        of pages that were sealed, and are so no more."""
        full = tokens // PAGE
        spoiled = range(full, max(full, self.sealed))
        self.sealed, self.shared = min(self.sealed, full), min(self.shared, full)
        self.rewind(min(self._computed, tokens))
        return spoiled

    def release(self) -> tuple[Sequence[int], Load | None]:
        """Give up everything: the pages, and a load that is still under way and keeps its own."""
        pages, load = self.pages, self.loading
        if load is not None:
            del pages[len(pages) - len(load.pages) :]
        self.pages, self.sealed, self.shared, self.loading = [], 0, 0, None
        self._computed = 0
        return pages, load

    def _set(self, computed: int) -> None:
        self._computed = computed
        assert self.sealed * PAGE <= computed, "a sealed page is not computed"
        assert computed <= len(self.pages) * PAGE, "tokens are computed that no page holds"
