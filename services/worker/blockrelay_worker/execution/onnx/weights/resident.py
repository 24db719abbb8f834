"""The weights of blocks on a device: each block's once, whatever stages it belongs to, and longer than they last."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnxruntime as ort

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.model import ModelConfig
from blockrelay_worker.execution.onnx.graphs.flavours import Flavour
from blockrelay_worker.execution.onnx.graphs.stage import stage_graph
from blockrelay_worker.execution.onnx.providers.provider import Provider
from blockrelay_worker.execution.onnx.weights.arrays import block_weights

#: In the place of a block's number: the tables of the rotation.
TABLES = 0


@dataclass(slots=True)
class _Block:
    """`values` by their names in graphs. `proved`: it has given known answers since it was uploaded."""

    values: Mapping[str, Any]
    bytes: int
    users: int = 0
    proved: bool = False
    session: ort.InferenceSession | None = None


class ResidentWeights:
    """Of one model on one device. What no stage uses stays until `make_room` drops it. Used by the device's thread."""

    def __init__(self, provider: Provider, model: ModelConfig, flavour: Flavour, bits: Mapping[int, int]) -> None:
        """`bits` of small weights by block; the others are widened."""
        self._provider, self._model, self._flavour, self._bits = provider, model, flavour, bits
        self._blocks: OrderedDict[int, _Block] = OrderedDict()  # by number, least recently used first

    @property
    def small(self) -> set[int]:
        """Bits of those that are small."""
        return set(self._bits.values())

    @property
    def bytes(self) -> int:
        """Of all there are, used or not."""
        return sum(one.bytes for one in self._blocks.values())

    def missing(self, blocks: Iterable[int]) -> list[int]:
        """Those of `blocks` that would have to be uploaded."""
        return [block for block in blocks if block not in self._blocks]

    def use(self, folder: BlockFolder, blocks: Sequence[int], session: ort.InferenceSession) -> dict[str, Any]:
        """The values of `blocks`, by their names in graphs, for a stage that gives them back. What is missing is
        uploaded from `folder`, with the help of a session of the device."""
        for block in self.missing(blocks):
            self._blocks[block] = self._uploaded(folder, block, session)
        found: dict[str, Any] = {}
        for block in blocks:
            one = self._at(block)
            one.users += 1
            found.update(one.values)
        return found

    def give_back(self, blocks: Sequence[int]) -> None:
        """A stage that used them is closed."""
        for block in blocks:
            self._at(block).users -= 1

    def session(self, block: int) -> ort.InferenceSession:
        """Of one block alone, made once. Its weights are those that are here."""
        one = self._at(block)
        if one.session is None:
            one.session = self._provider.session(stage_graph(self._model, block, block, self._flavour, self._bits))
        return one.session

    def are_proved(self, blocks: Iterable[int]) -> bool:
        """Whether each of them has given known answers since it was uploaded, whatever stage it was in."""
        blocks = list(blocks)
        return not self.missing(blocks) and all(self._at(block).proved for block in blocks)

    def prove(self, blocks: Iterable[int]) -> None:
        """They have."""
        for block in blocks:
            self._at(block).proved = True

    def make_room(self, wanted: Sequence[int], *, more_bytes: int, room_bytes: int) -> None:
        """Before `more_bytes` of the blocks `wanted` are uploaded: drop what no stage uses, nor will, and what was used
        longest ago first, until all weights take `room_bytes`."""
        for block in [block for block, one in self._blocks.items() if not one.users and block not in wanted]:
            if self.bytes + more_bytes <= room_bytes:
                return
            del self._blocks[block]

    def _at(self, block: int) -> _Block:
        self._blocks.move_to_end(block)
        return self._blocks[block]

    def _uploaded(self, folder: BlockFolder, block: int, session: ort.InferenceSession) -> _Block:
        if block == TABLES:
            tables = zip(("cos", "sin"), folder.rotary(), strict=True)
            arrays = {name: table.astype(self._flavour.dtype) for name, table in tables}
        else:
            weights = block_weights(folder, block, self._flavour.dtype, self._bits.get(block, 0))
            arrays = {f"block_{block}/{name}": array for name, array in weights.items()}
        values = {name: self._provider.upload(session, array) for name, array in arrays.items()}
        return _Block(values, sum(array.nbytes for array in arrays.values()))
