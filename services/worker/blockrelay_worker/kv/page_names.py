"""Block hashes of KV pages (here: names): a page's name says what the page holds, not where it is. Pure.

A name chains the tokens from position 0 to the page's end onto a root of (salt, model, numerics id). In a precision
marked exact, equal names promise equal bits on every worker. If a nondeterministic device computes a part of a
request, the root is of that request alone, and names promise the same tokens, not the same bits. A name stands for the
page of every block: the record of a stored page adds the block number (see `kv.store.record`). So a worker whose stage
has other blocks than the writer's finds those that it needs, and tokens are hashed once and not once per block.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from blockrelay_worker.kernels.specification import PAGE

#: Bytes of a page name.
NAME_BYTES = 32


def root_name(*, salt: str, model_hash: str, numerics: str) -> bytes:
    """The root of a request's chain of names. Requests share pages only if all three arguments are equal."""
    return _root(b"br-page-root", salt, model_hash, numerics)


def private_root_name(*, request: str, model_hash: str) -> bytes:
    """The root of a request whose pages come from a nondeterministic device. Only runs of that request share pages.

    `request` is its id.
    """
    return _root(b"br-private-root", request, model_hash)


def local_root_name(*, life: str, salt: str, model_hash: str, session: str = "", behind: Sequence[str] = ()) -> bytes:
    """The root of pages from a nondeterministic device that other requests on the same worker may reuse.

    Those are requests of equal `salt`, or only the other steps of a `session`. `life` is the id of one page pool and
    its content. `behind` are the ids of the workers of the stages before: pages were computed from their rows. A
    restarted worker has a new id, so pages computed from wrong rows are not found after the device that made them is
    gone.
    """
    return _root(b"br-local-root", life, salt, model_hash, session, *behind)


def _root(kind: bytes, *parts: str) -> bytes:
    digest = blake2b(digest_size=NAME_BYTES, person=kind)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)  # with lengths, different parts never give equal bytes
    return digest.digest()


def extend_names(names: list[bytes], root: bytes, tokens: Sequence[int], pages: int) -> None:
    """Appends the names of the next full pages of `tokens` to `names` until it has `pages` names.

    `names` has those of the first pages already, from the same root and tokens. Needs len(tokens) >= 16 * pages.
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
    """The name of a partial page, of which only the first 1 to 15 `tokens` are computed.

    `before` is the name of the page before it, or the root.
    """
    assert 0 < len(tokens) < PAGE, "a page that is full, or empty, is not begun"
    return blake2b(before + np.asarray(tokens, dtype="<i4").tobytes(), digest_size=NAME_BYTES).digest()
