"""Block hashes of KV pages: a page's block hash says what the page holds, not where it is. Pure.

A block hash chains the tokens from position 0 to the page's end onto a root of (salt, model, numerics id). In a
precision marked exact, equal hashes promise equal bits on every worker. If a nondeterministic device computes a part of
a request, the root is of that request alone, and hashes promise the same tokens, not the same bits. A hash stands for
the page of every block: the record of a stored page adds the block number (see `kv.store.record`). So a worker whose
stage has other blocks than the writer's finds those that it needs, and tokens are hashed once and not once per block.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from blockrelay_worker.kernels.specification import PAGE

#: Bytes of a block hash.
HASH_BYTES = 32


def root_hash(*, salt: str, model_hash: str, numerics: str) -> bytes:
    """The root of a request's chain of block hashes. Requests share pages only if all three arguments are equal."""
    return _root(b"br-page-root", salt, model_hash, numerics)


def private_root_hash(*, request_id: str, model_hash: str) -> bytes:
    """The root of a request whose pages come from a nondeterministic device. Only runs of that request share pages."""
    return _root(b"br-private-root", request_id, model_hash)


def local_root_hash(
    *, pool_id: str, salt: str, model_hash: str, session: str = "", behind: Sequence[str] = ()
) -> bytes:
    """The root of pages from a nondeterministic device that other requests on the same worker may reuse.

    Requests of equal `salt` may, or with a `session` only its other steps. `pool_id` is the id of one page pool and
    its content. `behind` are the ids of the workers of the stages before: pages were computed from their rows. A
    restarted worker has a new id, so pages computed from wrong rows are not found after the device that made them is
    gone.
    """
    return _root(b"br-local-root", pool_id, salt, model_hash, session, *behind)


def _root(kind: bytes, *parts: str) -> bytes:
    digest = blake2b(digest_size=HASH_BYTES, person=kind)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)  # with lengths, different parts never give equal bytes
    return digest.digest()


def extend_hashes(hashes: list[bytes], root: bytes, tokens: Sequence[int], pages: int) -> None:
    """Appends the hashes of the next full pages of `tokens` to `hashes` until it has `pages` hashes.

    `hashes` has those of the first pages already, from the same root and tokens. Needs len(tokens) >= 16 * pages.
    """
    done = len(hashes)
    if pages <= done:
        return
    assert len(tokens) >= pages * PAGE, "a page that is not full has no hash"
    data = np.asarray(tokens[done * PAGE : pages * PAGE], dtype="<i4").tobytes()
    size = PAGE * 4
    last = hashes[-1] if hashes else root
    for at in range(0, len(data), size):
        last = blake2b(last + data[at : at + size], digest_size=HASH_BYTES).digest()
        hashes.append(last)


def partial_page_hash(before: bytes, tokens: Sequence[int]) -> bytes:
    """The block hash of a partial page, of which only the first 1 to 15 `tokens` are computed.

    `before` is the hash of the page before it, or the root.
    """
    assert 0 < len(tokens) < PAGE, "a page that is full, or empty, is not begun"
    return blake2b(before + np.asarray(tokens, dtype="<i4").tobytes(), digest_size=HASH_BYTES).digest()
