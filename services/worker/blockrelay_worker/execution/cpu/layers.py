"""The blocks of a stage: layers (the first with the embedding) and the head, on the residual stream."""

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.model import hadamard_size, quantises_rows, row_group
from blockrelay_worker.execution.cpu.linears import Backend, load_linear
from blockrelay_worker.execution.cpu.slot_mapping import SlotMapping
from blockrelay_worker.execution.cpu.workspace import Workspace
from blockrelay_worker.kernels.arguments import F32, I32, Pages
from blockrelay_worker.kernels.interface import Kernels, Linear


class Layer:
    """One layer: attention and MLP as in Llama, with Qwen's bias and head norms where the folder has them."""

    def __init__(self, folder: BlockFolder, index: int, *, backend: Backend, threads: int, kernels: Kernels) -> None:
        """Loads block `index` (from 1) of the folder. `threads` and `backend` are those of `load_linear`.

        Raises BlockFolderError if its file is too short or ONNX Runtime refuses a graph of the folder. Raises
        ExecutionError if ONNX Runtime has no usable library, or if our kernels refuse the tensors.
        """
        model, tensors = folder.model, {name: np.asarray(array) for name, array in folder.tensors(index).items()}
        self._kernels = kernels
        self._model = model
        self._eps = model.rms_norm_eps
        self._quantised = quantises_rows(folder.manifest.precision_of(index))
        self._group = row_group(folder.manifest.precision_of(index))
        self._hadamard = hadamard_size(model, folder.manifest.precision_of(index))
        self.embedding: NDArray[Any] | None = tensors.get("embedding")
        self._norm_attention = cast(F32, tensors["norm_attention"])
        self._norm_mlp = cast(F32, tensors["norm_mlp"])
        self._bias = cast(F32 | None, tensors.get("qkv.bias"))
        self._norm_q = cast(F32 | None, tensors.get("norm_q"))
        self._norm_k = cast(F32 | None, tensors.get("norm_k"))
        self.linears = {
            kind: load_linear(folder, index, kind, tensors, backend=backend, threads=threads, kernels=kernels)
            for kind in ("qkv", "o", "gate_up", "down")
        }

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
        model = self._model
        y, scale = self._normed_linear(self.linears["qkv"], x, self._norm_attention, space, model.qkv_columns)
        return self._kernels.rotary_append(
            y, scale, self._bias, self._norm_q, self._norm_k, self._eps, rows.cos, rows.sin, rows.positions, rows.page,
            rows.slot, k_pages, v_pages, out=space.query(x.shape[0], model.heads, model.head_dim),
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
        kernels, model, linears = self._kernels, self._model, self.linears
        count = x.shape[0]
        heads = model.heads * model.head_dim
        mixed = kernels.attention(q, k_pages, v_pages, page_table, segments, out=space.mixed(count, heads))
        if self._quantised:
            u, scale = kernels.quantise(
                mixed,
                group=self._group,
                u=space.quantised(count, heads),
                scale=space.scale(0, count, heads, self._group),
            )
            y, scale = self._apply(linears["o"], u, scale, space, model.hidden_size)
        else:
            y, scale = self._apply(linears["o"], mixed, None, space, model.hidden_size)
        kernels.add_scaled(x, y, scale)

        width = model.intermediate_size
        y, scale = self._normed_linear(linears["gate_up"], x, self._norm_mlp, space, 2 * width)
        if self._quantised:
            u, scale = kernels.swiglu_quantise(
                y, scale, self._hadamard, group=self._group,
                u=space.quantised(count, width), scale=space.scale(1, count, width, self._group),
            )  # fmt: skip
            y, scale = self._apply(linears["down"], u, scale, space, model.hidden_size)
        else:
            mixed = kernels.swiglu(y, out=space.normed(count, width))
            y, scale = self._apply(linears["down"], mixed, None, space, model.hidden_size)
        kernels.add_scaled(x, y, scale)

    def _normed_linear(
        self, linear: Linear, x: F32, weight: F32, space: Workspace, width: int
    ) -> tuple[F32, F32 | None]:
        """Returns (norm(x) @ linear [R, width], the row scales that it lacks; None if it lacks none)."""
        count, hidden = x.shape
        if not self._quantised:
            normed = self._kernels.norm(x, weight, self._eps, out=space.normed(count, hidden))
            return self._apply(linear, normed, None, space, width)
        u, scale = self._kernels.norm_quantise(
            x, weight, self._eps, group=self._group,
            u=space.quantised(count, hidden), scale=space.scale(0, count, hidden, self._group),
        )  # fmt: skip
        return self._apply(linear, u, scale, space, width)

    @staticmethod
    def _apply(
        linear: Linear, rows: NDArray[Any], scale: F32 | None, space: Workspace, width: int
    ) -> tuple[F32, F32 | None]:
        """Returns (rows @ linear [R, width], the row scales that it lacks)."""
        out = space.linear_output(rows.shape[0], width)
        return out, _multiply(linear, rows, scale, out)


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

    def __init__(self, folder: BlockFolder, index: int, *, backend: Backend, threads: int, kernels: Kernels) -> None:
        """Loads block `index`, the last one of the folder.

        Raises BlockFolderError and ExecutionError as `Layer` does.
        """
        tensors = {name: np.asarray(array) for name, array in folder.tensors(index).items()}
        self._kernels = kernels
        self._eps = folder.model.rms_norm_eps
        self._quantised = quantises_rows(folder.manifest.precision_of(index))
        self._group = row_group(folder.manifest.precision_of(index))
        self._norm = cast(F32, tensors["norm_final"])
        self.linears = {
            "head": load_linear(folder, index, "head", tensors, backend=backend, threads=threads, kernels=kernels)
        }

    def run_wanted(self, x: F32, wanted: NDArray[np.intp], space: Workspace, out: F32) -> None:
        """Writes the logits of the rows `wanted` (indexes, ascending) to `out` [n, vocab].

        x [R, H] has all rows, or only the n wanted ones in their order. Raises ExecutionError if ONNX Runtime fails.
        """
        if not wanted.size:
            return
        if x.shape[0] != wanted.size:
            x = np.take(x, wanted, axis=0, out=space.wanted(wanted.size, x.shape[1]))
        count, hidden = x.shape
        if not self._quantised:
            self.linears["head"](self._kernels.norm(x, self._norm, self._eps, out=space.normed(count, hidden)), out)
            return
        u, scale = self._kernels.norm_quantise(
            x, self._norm, self._eps, group=self._group,
            u=space.quantised(count, hidden), scale=space.scale(0, count, hidden, self._group),
        )  # fmt: skip
        scale = _multiply(self.linears["head"], u, scale, out)
        if scale is not None:
            self._kernels.scale_rows(out, scale)


Block = Layer | Head
"""A block of a stage. Several executors may use one at the same time: all that changes is theirs."""


def load_block(folder: BlockFolder, index: int, *, backend: Backend, threads: int, kernels: Kernels) -> Block:
    """Loads block `index` (from 1) of the folder: a layer, or the head if it is the last one.

    Raises BlockFolderError and ExecutionError as `Layer` does.
    """
    kind = Head if index == folder.model.blocks else Layer
    return kind(folder, index, backend=backend, threads=threads, kernels=kernels)
