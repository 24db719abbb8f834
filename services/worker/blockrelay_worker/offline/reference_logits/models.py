"""The models that compute reference logits: our own kernels, or ONNX Runtime on files of other makers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.host.cpu import cores
from blockrelay.onnx_blocks.model_file import model_without_weights, name_real_files
from blockrelay.onnx_blocks.served_shape import LOGITS, ServedShape, served_shape, served_wiring
from blockrelay.onnx_blocks.wiring import FromBlock, FromPast, Wiring
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.loader import executors_for
from blockrelay_worker.execution.onnx.providers.provider import WEIGHTS_FOLDER
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.offline.reference_logits.distances import Tolerance, tolerance_of

#: Rows per run of our kernels: enough for full speed.
CHUNK_ROWS = 256
_PACKED = "MatMulNBits"
_QUIET = 4
Array = NDArray[Any]


class ReferenceModel(Protocol):
    """A model that computes reference logits."""

    @property
    def tolerance(self) -> Tolerance:
        """The distances that other right computations may have (see `tolerance_of`)."""
        ...

    def rows(self, sequences: Sequence[Sequence[int]]) -> list[Array]:
        """The logits [tokens, vocabulary] of each sequence of token ids: for each token, those of the next one.

        They are float32 from our kernels. From ONNX files they have the float type that the last file declares.
        A sequence has at least one token, and no more than the model's context.
        """
        ...


class OwnKernels:
    """A block folder on our own kernels, one sequence at a time, without reused KV pages. Implements ReferenceModel."""

    def __init__(self, folder: BlockFolder) -> None:
        """Loads the model. Raises BlockFolderError if a block gives a wrong known answer."""
        context = folder.model.max_position
        self.tolerance = tolerance_of(folder.manifest.precisions)
        executors = executors_for(folder, threads=cores())
        self._executor = executors.load(folder, 1, folder.model.blocks, pages=pages_for(context))
        self._pages = self._executor.pool.allocate(pages_for(context))

    def rows(self, sequences: Sequence[Sequence[int]]) -> list[Array]:
        return [np.concatenate([self._run(one, at) for at in range(0, len(one), CHUNK_ROWS)]) for one in sequences]

    def _run(self, tokens: Sequence[int], first: int) -> Array:
        chunk = tokens[first : first + CHUNK_ROWS]
        output = self._executor.run(
            Batch(
                segments=[Segment(rows=len(chunk), first_position=first, pages=self._pages)],
                tokens=np.asarray(chunk, np.int32),
                wanted=range(len(chunk)),
            )
        )
        assert output.logits is not None, "a stage with all blocks gives logits"
        return output.logits.copy()  # the next run writes into the same memory


class OnnxFiles:
    """ONNX blocks of other makers on ONNX Runtime's CPU provider. Implements ReferenceModel.

    Each sequence goes whole through one file after the other, without KV pages, batch or graphs of ours. One file is
    loaded at a time.
    """

    def __init__(self, folder: BlockFolder) -> None:
        """`folder` must be one that describes ONNX blocks of other makers. Loads no weights yet.

        Raises OnnxBlocksError if its `blocks.json` or a file cannot be read, or the blocks do not fit together.
        """
        assert folder.onnx_root is not None, "a model of ONNX blocks"
        self._root: Path = folder.onnx_root
        self._wiring: Wiring = served_wiring(folder.root)
        self._shape: ServedShape = served_shape(self._wiring)
        self.tolerance = tolerance_of(folder.manifest.precisions, packed=any(map(self._packed, self._files)))
        self._last_taker = {
            name: index
            for index, sources in enumerate(self._wiring.sources, 1)
            for name, source in sources.items()
            if isinstance(source, FromBlock)
        }

    def rows(self, sequences: Sequence[Sequence[int]]) -> list[Array]:
        known = [_request(tokens) for tokens in sequences]
        for index, file in enumerate(self._files, 1):
            session = self._session(file)
            outputs = [output.name for output in session.get_outputs()]
            kept = [name for name in outputs if name == LOGITS or self._last_taker.get(name, 0) > index]
            for tensors in known:
                made: Any = session.run(kept, self._feeds(index, tensors)) if kept else ()
                for name in [name for name, last in self._last_taker.items() if last == index and name != LOGITS]:
                    del tensors[name]
                tensors.update(zip(kept, made, strict=True))
        return [tensors[LOGITS][0] for tensors in known]

    @property
    def _files(self) -> list[str]:
        return [block.file for block in self._wiring.blocks]

    def _packed(self, file: str) -> bool:
        """True if the file has matmuls with weights of few bits."""
        nodes = model_without_weights(self._root / file, file).graph.node
        return any(node.op_type == _PACKED for node in nodes)

    def _session(self, file: str) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.log_severity_level = _QUIET
        model = model_without_weights(self._root / file, file)
        options.add_session_config_entry(WEIGHTS_FOLDER, str(name_real_files(model, self._root)))
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def _feeds(self, index: int, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """The inputs of block `index`; past KV is empty, since a sequence begins at its first token."""
        sources, feeds = self._wiring.sources[index - 1], dict[str, Array]()
        for tensor in self._wiring.blocks[index - 1].inputs:
            if isinstance(sources[tensor.name], FromPast):
                feeds[tensor.name] = np.zeros((1, self._shape.kv_heads, 0, self._shape.head_dim), tensor.dtype)
            else:
                feeds[tensor.name] = tensors[tensor.name].astype(tensor.dtype, copy=False)
        return feeds


def _request(tokens: Sequence[int]) -> dict[str, Array]:
    """The input tensors of a request in a batch of one."""
    count = len(tokens)
    return {
        "input_ids": np.asarray([tokens], np.int64),
        "attention_mask": np.ones((1, count), np.int64),
        "position_ids": np.arange(count)[None],
    }
