"""Names of pages: what a page holds, and nothing about where it lies. Pure.

A name chains the tokens from position 0 to the page's end onto a root of (salt, model, numerics id): equal names
promise equal bits in a precision marked exact, whoever computed them. Where a device that varies has a part in a
request, its pages are named from a root of that request alone, and promise numbers and no bits. A name stands for the
page of every block: the block number is added where a block's page is stored (`kv.store.record`), so that a
worker whose stage has other blocks than the writer's still finds those that it needs, and the tokens are hashed once
and not once per block.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from blockrelay_worker.kernels.specification import PAGE

#: Bytes of a name.
NAME_BYTES = 32


def root_name(*, salt: str, model_hash: str, numerics: str) -> bytes:
    """Where the chain of a request begins. Different in any of the three: nothing in common."""
    return _root(b"br-page-root", salt, model_hash, numerics)


def private_root_name(*, request: str, model_hash: str) -> bytes:
    """Where the chain of a request begins whose pages some device has made that does not compute the same bits twice:
    runs of that request have it in common, and nobody else."""
    return _root(b"br-private-root", request, model_hash)


def local_root_name(*, life: str, salt: str, model_hash: str, session: str = "", behind: Sequence[str] = ()) -> bytes:
    """Where the chain of a request begins whose pages other requests of equal salt, or the other steps of a `session`,
    may take though their bits are not what the tokens decide: in one pool, and as long as it has one content (`life`).
    `behind` are the workers, of the stages before, whose rows the pages were computed from: their ids are new for every
    life, so that what a device made of wrong numbers is not found once it has gone.
    """
    return _root(b"br-local-root", life, salt, model_hash, session, *behind)


def _root(kind: bytes, *parts: str) -> bytes:
    digest = blake2b(digest_size=NAME_BYTES, person=kind)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)  # lengths: no two triples are the same bytes
    return digest.digest()


def extend_names(names: list[bytes], root: bytes, tokens: Sequence[int], pages: int) -> None:
    """Append the names of the next full pages of `tokens` until there are `pages`.

    `names` holds those of its first pages already and must come from the same root and tokens. Needs
    len(tokens) >= 16 * pages.
    """
    done = len(names)
    if pages <= done:
        return
    assert len(tokens) >= pages * PAGE, "a page that is not full has no name"
    data = np.asarray(tokens[done * PAGE : pages * PAGE], dtype="<i4").tobytes()
    size = PAGE * 4
    last = names[-1] if names else root
    for at in range(0, len(data), size):
        last = blake2b(last + data[at : at + size], digest_size=NAME_BYTES).digest()
        names.append(last)


def begun_page_name(before: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a page of which only these first tokens, 1 to 15, are computed. `before`: the name of the page before
    it, or the root."""
    assert 0 < len(tokens) < PAGE, "a page that is full, or empty, is not begun"
    return blake2b(before + np.asarray(tokens, dtype="<i4").tobytes(), digest_size=NAME_BYTES).digest()
