"""Pages that leave a worker, and the runs that go on from them; tokens of devices that vary (`Bounds.handover`).

A page is a unit here. Each leaves its worker with the step that fills it, or never does: then whoever takes the place
of the worker does not find it. Its name says what a worker puts into names (`kv/block_hashes.py`), and it also keeps
what it was made of, so that a run which computes on the wrong one is seen.
"""

from collections.abc import Iterator

from tests.protocol_model.bounds import Bounds
from tests.protocol_model.data import Commit, Page, Run, Segment, State

#: So far behind a position's own token is the one that only a device that varies takes, or who goes on from its pages.
OTHER = 100
#: Of names that many requests have in common: below it the numerics id. Without the rule, of all private ones.
SHARED, ALL_PRIVATE = -1, -100


def _named(b: Bounds, run: Run, worker: int, units: int) -> tuple[int, int, int, tuple[int, ...]]:
    """Root, stage, units and tokens: what the name of the page that ends behind so many units is made of."""
    root = SHARED - b.numerics(worker)
    if run.private and b.rules.varying_pages_are_private:
        root = run.request_id if b.rules.private_names_name_the_request else ALL_PRIVATE
    tokens = _under(b, run, units) if b.rules.names_chain_tokens else ()
    return root, b.stage(worker), units, tokens


def _under(b: Bounds, run: Run, units: int) -> tuple[int, ...]:
    return run.tokens[: max(0, units - b.prompt)]


def adopted(b: Bounds, state: State, run: Run, worker: int, most: int) -> Run:
    """A run without pages, with the longest beginning that is stored, of `most` units."""
    if not b.handover:
        return run
    stored = {page[:4]: page for page in state.stored}
    for units in range(1, most + 1):
        page = stored.get(_named(b, run, worker, units))
        if page is None:
            break
        if page.request != run.request_id and run.private:
            run = run._replace(wrong=f"a page of request {page.request}")
        elif page.under != _under(b, run, units):
            run = run._replace(wrong=f"a page of the tokens {page.under}")
        run = run._replace(computed=units, varied=run.varied or page.varied)
    return run


def reusable(run: Run, limit: int) -> int:
    """How many units may be found: the last one known is always computed."""
    return run.known - 1 if limit < 0 else min(run.known - 1, limit)


def stores(b: Bounds, state: State, run: Run, worker: int, before: int) -> Iterator[tuple[str, State]]:
    """The pages of a run behind `before` units have been filled: they leave the worker, or do not."""
    if not b.handover or not b.pages_leave:
        yield "", state
        return
    known = {page[:4] for page in state.stored}
    fresh = list[Page]()
    for units in range(1, run.computed + 1):
        name = _named(b, run, worker, units)
        if units > before and name not in known:
            fresh.append(Page(*name, run.request_id, _under(b, run, units), run.varied))
        elif name not in known:
            break  # nobody finds what is behind
    if run.private or not fresh:
        yield "", state
    if fresh:
        yield ", whose pages are stored", state._replace(stored=tuple(sorted((*state.stored, *fresh))))


def begins(b: Bounds, run: Run, worker: int) -> Run:
    """The run on this worker, whose device may vary."""
    return run._replace(varied=run.varied or b.numerics(worker) in b.varying) if b.handover else run


def receives(run: Run, segment: Segment) -> Run:
    """The run with rows of the stage before."""
    return run._replace(tokens=segment.tokens, varied=run.varied or segment.varied)


def chosen(b: Bounds, run: Run, item: Commit) -> Iterator[tuple[Run, Commit]]:
    """What may be sampled in place of `item`, and the run with it."""
    if not b.handover or not item.tokens:
        yield run, item
        return
    (token,) = item.tokens
    for each in (token, token + OTHER) if run.varied and token in b.choices else (token,):
        yield run, item._replace(tokens=(each,))
