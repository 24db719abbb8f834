"""The blocks of a stage: layers (the first with the embedding) and the head, on the residual stream.

Where ranks share a stage, each computes its own heads and columns. What the next step needs whole, they exchange.
"""

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.model import hadamard_size, quantises_rows, row_group
from blockrelay_worker.execution.cpu.linears import Computation, load_linear
from blockrelay_worker.execution.cpu.slot_mapping import SlotMapping
from blockrelay_worker.execution.cpu.workspace import Workspace
from blockrelay_worker.kernels.arguments import F32, I32, Pages
from blockrelay_worker.kernels.interface import Linear


class Layer:
    """One layer: attention and MLP as in Llama, with Qwen's bias and head norms where the folder has them."""

    def __init__(self, folder: BlockFolder, index: int, by: Computation) -> None:
        """Loads this rank's share of block `index` (from 1) of the folder.

        Raises BlockFolderError if its file is too short or ONNX Runtime refuses a graph of the folder. Raises
        ExecutionError if ONNX Runtime has no usable library, or if our kernels refuse the tensors.
        """
        model, tensors = folder.model, {name: np.asarray(array) for name, array in folder.tensors(index).items()}
        self._kernels, self._cut, self._ranks, self._model = by.kernels, by.cut, by.ranks, model
        self._eps = model.rms_norm_eps
        self._quantised = quantises_rows(folder.manifest.precision_of(index))
        self._group = row_group(folder.manifest.precision_of(index))
        self._hadamard = hadamard_size(model, folder.manifest.precision_of(index))
        self.embedding: NDArray[Any] | None = tensors.get("embedding")
        self._norm_attention = cast(F32, tensors["norm_attention"])
        self._norm_mlp = cast(F32, tensors["norm_mlp"])
        bias = cast(F32 | None, tensors.get("qkv.bias"))
        self._bias = None if bias is None else by.cut.own("qkv", bias)
        self._norm_q = cast(F32 | None, tensors.get("norm_q"))
        self._norm_k = cast(F32 | None, tensors.get("norm_k"))
        self.linears = {kind: load_linear(folder, index, kind, tensors, by) for kind in ("qkv", "o", "gate_up", "down")}

    def run(self, x: F32, rows: SlotMapping, space: Workspace, k_pages: Pages, v_pages: Pages) -> None:
        """Runs the layer on x [R, H] in place, and writes the rows' keys and values to their KV pages.

        `k_pages` and `v_pages` are this layer's. Raises ExecutionError if ONNX Runtime fails.
        """
        q = self._append(x, rows, space, k_pages, v_pages)
        self._finish(x, q, rows.page_table, rows.segments, space, k_pages, v_pages)

    def run_wanted(
        self,
        x: F32,
        rows: SlotMapping,
        space: Workspace,
        k_pages: Pages,
        v_pages: Pages,
        wanted: NDArray[np.intp],
        result: F32,
    ) -> None:
        """Runs the last layer before the head: `result` [n, H] gets the output of the rows `wanted` only.

        Keys and values of all rows are written; the rest is not computed for other rows. `x` stays as it is. Raises
        ExecutionError if ONNX Runtime fails.
        """
        q = self._append(x, rows, space, k_pages, v_pages)
        if wanted.size:
            np.take(x, wanted, axis=0, out=result)
            self._finish(result, q[wanted], *rows.single(wanted), space, k_pages, v_pages)

    def _append(self, x: F32, rows: SlotMapping, space: Workspace, k_pages: Pages, v_pages: Pages) -> F32:
        """Returns the rotated queries [R, heads, head_dim] of x [R, H]; writes keys and values to their KV pages."""
        dim, mine = self._model.head_dim, self._cut.mine
        columns = (len(mine.heads) + 2 * len(mine.kv_heads)) * dim
        y, scale = self._normed_linear(self.linears["qkv"], x, self._norm_attention, space, columns)
        return self._kernels.rotary_append(
            y, scale, self._bias, self._norm_q, self._norm_k, self._eps, rows.cos, rows.sin, rows.positions, rows.page,
            rows.slot, k_pages, v_pages, out=space.query(x.shape[0], len(mine.heads), dim),
        )  # fmt: skip

    def _finish(
        self,
        x: F32,
        q: F32,
        page_table: I32,
        segments: NDArray[np.int64],
        space: Workspace,
        k_pages: Pages,
        v_pages: Pages,
    ) -> None:
        """Runs attention and MLP on the rows x [R, H] with queries q, in place."""
        kernels, model, mine, ranks = self._kernels, self._model, self._cut.mine, self._ranks
        count = x.shape[0]
        heads, width = model.heads * model.head_dim, model.intermediate_size
        mixed = ranks.part(0, space.mixed(count, q.shape[1] * q.shape[2]))
        kernels.attention(q, k_pages, v_pages, page_table, segments, out=mixed)
        if self._quantised:
            u, scale = ranks.gather_quantise(
                0, mixed, "heads", out=space.mixed(count, heads), group=self._group,
                u=space.quantised(count, heads), scale=space.scale(0, count, heads, self._group),
            )  # fmt: skip
            self._add(x, self.linears["o"], u, scale, space)
        else:
            mixed = ranks.all_gather(0, mixed, "heads", space.mixed(count, heads))
            self._add(x, self.linears["o"], mixed, None, space)

        y, scale = self._normed_linear(self.linears["gate_up"], x, self._norm_mlp, space, 2 * len(mine.mlp))
        if not self._quantised:
            activated = kernels.swiglu(y, out=ranks.part(0, space.normed(count, len(mine.mlp))))
            activated = ranks.all_gather(0, activated, "mlp", space.normed(count, width))
            self._add(x, self.linears["down"], activated, None, space)
            return
        u, its_scale = space.quantised(count, width), space.scale(1, count, width, self._group)
        if self._cut.is_whole:
            kernels.swiglu_quantise(y, scale, self._hadamard, group=self._group, u=u, scale=its_scale)
        else:
            activated = kernels.swiglu(y, scale, out=ranks.part(0, space.normed(count, len(mine.mlp))))
            ranks.gather_quantise(
                0, activated, "mlp", out=space.normed(count, width),
                hadamard=self._hadamard, group=self._group, u=u, scale=its_scale,
            )  # fmt: skip
        self._add(x, self.linears["down"], u, its_scale, space)

    def _add(self, x: F32, linear: Linear, rows: NDArray[Any], scale: F32 | None, space: Workspace) -> None:
        """Adds rows @ linear to x [R, H]; `rows` and `scale` are as in `_multiply`."""
        y = self._ranks.part(1, space.linear_output(x.shape[0], len(self._cut.mine.hidden)))
        scale = _multiply(linear, rows, scale, y)
        self._ranks.gather_add(1, y, x, scale, out=space.linear_output(*x.shape))

    def _normed_linear(
        self, linear: Linear, x: F32, weight: F32, space: Workspace, width: int
    ) -> tuple[F32, F32 | None]:
        """Returns (norm(x) @ linear [R, width], the row scales that it lacks; None if it lacks none)."""
        count, hidden = x.shape
        out = space.linear_output(count, width)
        if not self._quantised:
            normed = self._kernels.norm(x, weight, self._eps, out=space.normed(count, hidden))
            return out, _multiply(linear, normed, None, out)
        u, scale = self._kernels.norm_quantise(
            x, weight, self._eps, group=self._group,
            u=space.quantised(count, hidden), scale=space.scale(0, count, hidden, self._group),
        )  # fmt: skip
        return out, _multiply(linear, u, scale, out)


def _multiply(linear: Linear, rows: NDArray[Any], scale: F32 | None, out: F32) -> F32 | None:
    """Multiplies `rows` into `out`; returns the row scales by which the caller still has to multiply it, if any.

    Scales of groups, which have two dimensions, are for the linear layer.
    """
    if scale is not None and scale.ndim == 2:
        linear(rows, out, scale)
        return None
    linear(rows, out)
    return scale


class Head:
    """The last block: the final norm and the linear layer to the logits of the vocabulary."""

    def __init__(self, folder: BlockFolder, index: int, by: Computation) -> None:
        """Loads this rank's share of block `index`, the last one of the folder.

        Raises BlockFolderError and ExecutionError as `Layer` does.
        """
        tensors = {name: np.asarray(array) for name, array in folder.tensors(index).items()}
        self._kernels, self._cut, self._ranks = by.kernels, by.cut, by.ranks
        self._eps = folder.model.rms_norm_eps
        self._quantised = quantises_rows(folder.manifest.precision_of(index))
        self._group = row_group(folder.manifest.precision_of(index))
        self._norm = cast(F32, tensors["norm_final"])
        self.linears = {"head": load_linear(folder, index, "head", tensors, by)}

    def run_wanted(self, x: F32, wanted: NDArray[np.intp], space: Workspace, out: F32) -> None:
        """Writes the logits of the rows `wanted` (indexes, ascending) to `out` [n, vocab], in rank 0.

        x [R, H] has all rows, or only the n wanted ones in their order. Raises ExecutionError if ONNX Runtime fails.
        """
        if not wanted.size:
            return
        if x.shape[0] != wanted.size:
            x = np.take(x, wanted, axis=0, out=space.wanted(wanted.size, x.shape[1]))
        count, hidden = x.shape
        logits = self._ranks.part(0, out[:, : len(self._cut.mine.vocabulary)])
        if not self._quantised:
            normed = self._kernels.norm(x, self._norm, self._eps, out=space.normed(count, hidden))
            self.linears["head"](normed, logits)
        else:
            u, scale = self._kernels.norm_quantise(
                x, self._norm, self._eps, group=self._group,
                u=space.quantised(count, hidden), scale=space.scale(0, count, hidden, self._group),
            )  # fmt: skip
            scale = _multiply(self.linears["head"], u, scale, logits)
            if scale is not None:
                self._kernels.scale_rows(logits, scale)
        self._ranks.all_gather(0, logits, "vocabulary", out)


Block = Layer | Head
"""A block of a stage. Several executors may use one at the same time: all that changes is theirs."""


def load_block(folder: BlockFolder, index: int, by: Computation) -> Block:
    """Loads this rank's share of block `index` (from 1): a layer, or the head if it is the folder's last one.

    Raises BlockFolderError and ExecutionError as `Layer` does.
    """
    kind = Head if index == folder.model.blocks else Layer
    return kind(folder, index, by)
