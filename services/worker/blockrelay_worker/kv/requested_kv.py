"""Reads the KV that a tensor step asks for: each stage reads its own layers, once its last token is computed."""

from collections.abc import Sequence

from blockrelay.protocol.encoding.kv_pages import field
from blockrelay_worker.execution.executor import PageOwner


def read_requested(owner: PageOwner, first_block: int, layers: Sequence[int], pages: Sequence[int]) -> dict[str, bytes]:
    """Copies of the KV in `pages` (a request's, from its beginning) of the layers in `layers` that this stage has.

    The keys of the result are the fields that `protocol.encoding.kv_pages.field` names, by page and layer. Each value
    is raw bytes in the page's dtype: keys [kv_heads, head_dim, 16], then values [kv_heads, 16, head_dim]. `layers`
    counts from 0 over the whole model. `first_block` is the stage's first block, from 1. Raises ExecutionError when the
    device with the pages fails.
    """
    here = {layer: layer - (first_block - 1) for layer in layers}
    here = {layer: index for layer, index in here.items() if 0 <= index < owner.layout.layers}
    if not here:
        return {}
    return {
        field(number, layer): b"".join(half.tobytes() for half in content[index])
        for number, content in enumerate(owner.export_pages(pages))
        for layer, index in here.items()
    }
