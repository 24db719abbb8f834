"""The KV pages of a stage on its device: two pools for each layer, and the sessions that copy pages out and back."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from blockrelay.block_folder.model import ModelConfig
from blockrelay_worker.execution.executor import PageContent
from blockrelay_worker.execution.onnx.bound.session import BoundSession
from blockrelay_worker.execution.onnx.graphs.flavours import FloatType
from blockrelay_worker.execution.onnx.graphs.pages import export_graph, import_graph
from blockrelay_worker.execution.onnx.providers.provider import Provider
from blockrelay_worker.execution.page_layout import PageLayout
from blockrelay_worker.kernels.specification import PAGE


class DevicePages:
    """KV pools by name in `pools`: `block_<i>/keys` and `block_<i>/values` for each i of `layers`.

    Each pool is [pages, 16, kv_heads, head_dim]. Used by one thread at a time.
    """

    def __init__(
        self,
        provider: Provider,
        session: ort.InferenceSession,
        model: ModelConfig,
        layers: Sequence[int],
        layout: PageLayout,
        *,
        pages: int,
        dtype: FloatType,
    ) -> None:
        """Makes pools of `pages` pages of zeros in `dtype`. Outside the device, pages have the layout's type.
        `session`: any session of the device. Raises ONNX Runtime's error if there is no memory, UsageError for a pool
        larger than the device has in one piece."""
        self._provider, self._model, self._layers, self._layout = provider, model, layers, layout
        self._dtype: FloatType = dtype
        shape = (pages, PAGE, model.kv_heads, model.head_dim)
        self.pools: dict[str, ort.OrtValue] = {
            f"block_{layer}/{half}": provider.empty(session, shape, dtype)
            for layer in layers
            for half in ("keys", "values")
        }
        self._sessions: dict[str, BoundSession] = {}
        #: Bytes that went up to the device and came down since the last `moved_bytes`.
        self.up = self.down = 0

    @property
    def bytes(self) -> int:
        """Bytes of all pools."""
        return sum(value.tensor_size_in_bytes() for value in self.pools.values())

    def export_pages(self, pages: Sequence[int]) -> list[PageContent]:
        """Returns copies of the pages, in the layout's type. Each page has for each layer keys [kv_heads, head_dim, 16]
        and values [kv_heads, 16, head_dim]. Raises what ONNX Runtime raises."""
        if not pages or not self.pools:
            return [[] for _ in pages]
        step = self._session("export").run({"pages": np.asarray(pages, np.int64)}, None)
        with np.errstate(over="ignore"):  # values beyond float16 become infinite, as in a CPU's pages
            contents: list[NDArray[Any]] = [half.astype(self._layout.dtype, copy=False) for half in step.values()]
        self.down += sum(half.nbytes for half in contents)
        if self._provider.waits_for_outputs:
            contents = self._halves(contents[0])
        return [
            [(keys[at], values[at]) for keys, values in zip(contents[::2], contents[1::2], strict=True)]
            for at in range(len(pages))
        ]

    def _halves(self, contents: NDArray[Any]) -> list[NDArray[Any]]:
        """Splits the output of a joined export into keys and values of each layer, each [pages, ...]."""
        heads, size, pages = self._model.kv_heads, self._model.head_dim, len(contents)
        shapes = {"keys": (pages, heads, size, PAGE), "values": (pages, heads, PAGE, size)}
        parts = np.split(contents, len(self.pools), axis=1)
        return [part.reshape(shapes[name.rpartition("/")[2]]) for name, part in zip(self.pools, parts, strict=True)]

    def import_pages(self, pages: Sequence[int], contents: Sequence[PageContent]) -> None:
        """Writes `contents` into `pages`, in order: for each page the (keys, values) of each layer, as exported.

        Raises what ONNX Runtime raises.
        """
        if not pages or not self.pools:
            return
        halves = [
            np.stack([content[layer][half] for content in contents]).astype(self._dtype, copy=False)
            for layer in range(self._layout.layers)
            for half in range(2)
        ]
        inputs = dict(zip((f"{name}_page" for name in self.pools), halves, strict=True))
        self._session("import").run({"pages": np.asarray(pages, np.int64)[:, None], **inputs}, None)
        self.up += sum(half.nbytes for half in halves)

    def moved_bytes(self) -> tuple[int, int]:
        """Returns the bytes that went up and came down since the last call."""
        moved, self.up, self.down = (self.up, self.down), 0, 0
        return moved

    def clean_up(self) -> None:
        """Drops the sessions, which are made again when needed."""
        self._sessions.clear()

    def close(self) -> None:
        """Drops the sessions and all pools."""
        self._sessions.clear()
        self.pools.clear()

    def _session(self, way: Literal["export", "import"]) -> BoundSession:
        """Returns a session that copies pages in this direction, with the pools bound."""
        if way not in self._sessions:
            about = self._model, self._layers, self._dtype
            joined = self._provider.waits_for_outputs
            graph = export_graph(*about, joined=joined) if way == "export" else import_graph(*about)
            self._sessions[way] = BoundSession(self._provider.session(graph), {}, self.pools)
        return self._sessions[way]
