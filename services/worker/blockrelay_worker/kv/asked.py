"""KV that a tensor step asks for: each stage tells that of its own layers, once it has the last row."""

from collections.abc import Sequence

from blockrelay.protocol.encoding.kv_pages import field
from blockrelay_worker.execution.executor import PageOwner


def read_asked(owner: PageOwner, first_block: int, asked: Sequence[int], pages: Sequence[int]) -> dict[str, bytes]:
    """A copy of what `pages`, a request's from its beginning, hold of those layers in `asked` that the stage from
    `first_block` on has, by field. Raises ExecutionError when the device that has them fails."""
    here = {layer: layer - (first_block - 1) for layer in asked}
    here = {layer: index for layer, index in here.items() if 0 <= index < owner.layout.layers}
    if not here:
        return {}
    return {
        field(number, layer): b"".join(half.tobytes() for half in content[index])
        for number, content in enumerate(owner.export_pages(pages))
        for layer, index in here.items()
    }
