"""The weights of blocks that are on a device: one copy of each block, shared by all stages and kept when stages
close."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnxruntime as ort

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.model import ModelConfig
from blockrelay_worker.execution.onnx.graphs.flavours import Flavour
from blockrelay_worker.execution.onnx.graphs.linears import BlockForm
from blockrelay_worker.execution.onnx.graphs.stage import stage_graph
from blockrelay_worker.execution.onnx.providers.provider import Provider
from blockrelay_worker.execution.onnx.weights.arrays import bits_in, block_weights

#: Stands for the rotary tables where a block's number is expected.
TABLES = 0


@dataclass(slots=True)
class _Block:
    """The weights of one block. `values`: on the device, by their names in graphs. `users`: stages that use them.
    `proved`: the block has given known answers since its upload. `session`: of the block alone, if one was made."""

    values: Mapping[str, Any]
    bytes: int
    users: int = 0
    proved: bool = False
    session: ort.InferenceSession | None = None


class ResidentWeights:
    """The weights of one model on one device. Unused ones stay until `make_room` drops them. Used by the device's
    thread."""

    def __init__(
        self, provider: Provider, model: ModelConfig, flavour: Flavour, forms: Mapping[int, BlockForm]
    ) -> None:
        """`forms`: the form of each block's linear layers on the device, by block number."""
        self._provider, self._model, self._flavour, self._forms = provider, model, flavour, forms
        self._blocks: OrderedDict[int, _Block] = OrderedDict()  # by block number, least recently used first

    @property
    def small(self) -> set[int]:
        """The bits (8, 4) that small weights of this model have here; empty if all weights are floats."""
        return set(bits_in(self._forms.values()))

    @property
    def bytes(self) -> int:
        """Bytes of all weights on the device, used or not."""
        return sum(one.bytes for one in self._blocks.values())

    def missing(self, blocks: Iterable[int]) -> list[int]:
        """Returns those of `blocks` that are not on the device."""
        return [block for block in blocks if block not in self._blocks]

    def use(self, folder: BlockFolder, blocks: Sequence[int], session: ort.InferenceSession) -> dict[str, Any]:
        """Returns the weights of `blocks`, by their names in graphs, for a stage that will call `give_back`. Missing
        ones are uploaded from `folder`, whatever room there is: call `make_room` first. `session` is any session of the
        device. A block number may be TABLES. Raises what ONNX Runtime raises if an upload fails, UsageError for a
        tensor larger than the device allows, and BlockFolderError if a block's file is shorter than the manifest
        says."""
        for block in self.missing(blocks):
            self._blocks[block] = self._uploaded(folder, block, session)
        values: dict[str, Any] = {}
        for block in blocks:
            one = self._at(block)
            one.users += 1
            values.update(one.values)
        return values

    def give_back(self, blocks: Sequence[int]) -> None:
        """Notes that a stage which used `blocks` is closed. The weights stay on the device."""
        for block in blocks:
            self._at(block).users -= 1

    def session(self, block: int) -> ort.InferenceSession:
        """Returns the session of one block alone, made once. Its weights must be on the device; `block` is not TABLES.

        Raises what ONNX Runtime raises if the session cannot be made, and UsageError if this machine lacks something.
        """
        one = self._at(block)
        if one.session is None:
            one.session = self._provider.session(stage_graph(self._model, block, block, self._flavour, self._forms))
        return one.session

    def are_proved(self, blocks: Iterable[int]) -> bool:
        """Returns whether each of `blocks` has given known answers since its upload, in any stage."""
        blocks = list(blocks)
        return not self.missing(blocks) and all(self._at(block).proved for block in blocks)

    def prove(self, blocks: Iterable[int]) -> None:
        """Notes that `blocks`, which are on the device, have given known answers."""
        for block in blocks:
            self._at(block).proved = True

    def make_room(self, wanted: Sequence[int], *, more_bytes: int, room_bytes: int) -> None:
        """Drops unused weights, least recently used first, until all weights and `more_bytes` for an upload take at
        most `room_bytes`, or none is left. The blocks `wanted` are kept."""
        for block in [block for block, one in self._blocks.items() if not one.users and block not in wanted]:
            if self.bytes + more_bytes <= room_bytes:
                return
            del self._blocks[block]

    def _at(self, block: int) -> _Block:
        """Returns the entry of a block on the device, which is the most recently used one now."""
        self._blocks.move_to_end(block)
        return self._blocks[block]

    def _uploaded(self, folder: BlockFolder, block: int, session: ort.InferenceSession) -> _Block:
        """Reads the weights of a block (or the rotary tables) and copies them to the device."""
        if block == TABLES:
            tables = zip(("cos", "sin"), folder.rotary(), strict=True)
            arrays = {name: table.astype(self._flavour.dtype) for name, table in tables}
        else:
            weights = block_weights(folder, block, self._flavour.dtype, self._forms[block])
            arrays = {f"block_{block}/{name}": array for name, array in weights.items()}
        values = {name: self._provider.upload(session, array) for name, array in arrays.items()}
        return _Block(values, sum(array.nbytes for array in arrays.values()))
