"""The executor of one stage, consecutive blocks of a model as one ONNX graph, on the device of an execution
provider."""

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import BlockFolderError, ExecutionError
from blockrelay.protocol.capabilities import Capabilities
from blockrelay_worker.execution.batch import (
    Batch,
    BlockFault,
    Segment,
    StageOutput,
    check_segments,
    hidden_of,
    tokens_of,
)
from blockrelay_worker.execution.executor import PageContent
from blockrelay_worker.execution.onnx.batches import batch_inputs, cut
from blockrelay_worker.execution.onnx.block_times import BlockTimes
from blockrelay_worker.execution.onnx.bound.pages import DevicePages
from blockrelay_worker.execution.onnx.bound.session import Arrays, BoundSession
from blockrelay_worker.execution.onnx.compiled.captured import SPARE_PAGES, CapturedSteps
from blockrelay_worker.execution.onnx.failures import classify
from blockrelay_worker.execution.onnx.graphs.flavours import Flavour
from blockrelay_worker.execution.onnx.graphs.stage import stage_graph
from blockrelay_worker.execution.onnx.known_answers import TOLERANCES
from blockrelay_worker.execution.onnx.providers.provider import Place, Provider
from blockrelay_worker.execution.onnx.selection import Selection
from blockrelay_worker.execution.onnx.weights.arrays import bits_in, forms_of
from blockrelay_worker.execution.onnx.weights.resident import TABLES, ResidentWeights
from blockrelay_worker.execution.page_layout import layout_of
from blockrelay_worker.execution.page_pool import PagePool
from blockrelay_worker.execution.self_test import fixed_rows, fixed_tokens
from blockrelay_worker.kernels.specification import PAGE
from blockrelay_worker.policy import ONNX_MAX_ROWS


class OnnxStage:
    """Blocks `first_block..last_block` (numbered from 1, both included) of one block folder on one device.

    Not exact: bits depend on the batch, the device and its driver. One thread uses it, except for exports and imports,
    which wait for the step that runs.
    """

    def __init__(
        self,
        folder: BlockFolder,
        first_block: int,
        last_block: int,
        *,
        pages: int,
        provider: Provider,
        numerics_id: str,
        flavour: Flavour,
        longest: int | None = None,
        per_block: bool = False,
        small: Collection[int] = (),
        capture: bool = False,
        weights: ResidentWeights | None = None,
    ) -> None:
        """`pages`: KV pages of the stage. `flavour`: float type and attention of the graph. Segments are cut to
        `longest` tokens, for a device that is wrong beyond; None: they are not. `per_block`: every step runs block by
        block, and is measured. `small`: bits (8, 4) of weights that stay small; all others are widened to floats.
        `capture`: decode steps are recorded on the device and replayed. `weights` outlive the stage; None: it has its
        own. Raises BlockFolderError for blocks that the model does not have or whose file is too short. Raises
        UsageError if this machine lacks something or a pool is too large, and ONNX Runtime's own errors."""
        model = folder.model
        if not 1 <= first_block <= last_block <= model.blocks:
            raise BlockFolderError(f"there are no blocks {first_block} to {last_block}: the model has {model.blocks}")
        self.folder, self.first_block, self.last_block = folder, first_block, last_block
        self.layout = layout_of(folder, first_block, last_block)
        self.pool = PagePool(self.layout, pages)
        forms = forms_of(folder.manifest, small)
        few = bits_in(forms[block] for block in range(first_block, last_block + 1))
        self.details: Mapping[str, str] = {
            "provider": provider.ort_name,
            "flavour": flavour.name,
            "dtype": flavour.dtype,
            **({"small weights": " and ".join(f"{one} bits" for one in few)} if few else {}),
            **({} if longest is None else {"quirk": f"segments are cut to {longest} rows"}),
        }
        self.capabilities = Capabilities(
            exact=False,
            ragged=True,
            max_rows=ONNX_MAX_ROWS,
            max_sequences=ONNX_MAX_ROWS,
            precision=folder.manifest.precision,
            numerics_id=numerics_id,
            kv_tokens=pages * PAGE,
        )
        self._provider = provider
        self._flavour, self._longest = flavour, longest
        if weights is not None and first_block == last_block and not weights.missing([first_block]):
            session = weights.session(first_block)
        else:
            session = provider.session(stage_graph(model, first_block, last_block, flavour, forms))
        layers = range(first_block, min(last_block, model.layers) + 1)
        self._pages = DevicePages(
            provider,
            session,
            model,
            layers,
            self.layout,
            pages=pages + capture * SPARE_PAGES,
            dtype=flavour.dtype,
        )
        pools: Mapping[str, Any] = self._pages.pools
        blocks = range(first_block, last_block + 1)
        self._weights = weights or ResidentWeights(provider, model, flavour, forms)
        self._used = [*([TABLES] if layers else []), *blocks]
        self._held = self._weights.use(folder, self._used, session)
        self._times = BlockTimes(
            provider,
            blocks,
            self._weights.session,
            self._held,
            pools,
            always=per_block,
        )
        self._options: Any = None
        self._lock = threading.Lock()
        self._session = BoundSession(session, self._held, pools)
        self._selection = Selection(provider, model.vocab_size) if self.gives_logits and provider.place else None
        if self._selection is not None:
            self.details = {**self.details, "selects": ", ".join(self._selection.able) or "nothing"}
        self.captured = (
            CapturedSteps(
                provider,
                lambda width: stage_graph(model, first_block, last_block, flavour, forms, pages=width),
                self._held,
                pools,
                eager=lambda segments, given: self._computed({**given, **batch_inputs(segments, flavour)}),
                known=self._known_rows,
                model=model,
                flavour=flavour,
                first_spare_page=pages,
                tolerance=TOLERANCES[flavour.dtype],
            )
            if capture and layers
            else None
        )

    @property
    def usable(self) -> bool:
        """Always true: a lost device ends the process of this stage."""
        return True

    @property
    def takes_tokens(self) -> bool:
        """True if the stage has block 1, so that its input is token ids."""
        return self.first_block == 1

    @property
    def gives_logits(self) -> bool:
        """True if the stage has the last block, so that its output is logits."""
        return self.last_block == self.folder.model.blocks

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights on the device, rotary tables included."""
        return sum(value.tensor_size_in_bytes() for value in self._held.values())

    @property
    def pool_bytes(self) -> int:
        """Bytes of all its KV pages."""
        return self._pages.bytes

    def moved_bytes(self) -> tuple[int, int]:
        """Returns two numbers of bytes since the last call, without weights: up to the device, and down to the host."""
        return self._pages.moved_bytes()

    def export_pages(self, pages: Sequence[int]) -> list[PageContent]:
        """Returns copies of the pages, in the type of `layout`. Raises what ONNX Runtime raises."""
        with self._lock:
            return self._pages.export_pages(pages)

    def import_pages(self, pages: Sequence[int], contents: Sequence[PageContent]) -> None:
        """Writes pages: see `PageOwner.import_pages`. Raises what ONNX Runtime raises."""
        with self._lock:
            self._pages.import_pages(pages, contents)

    def block_by_block(self) -> AbstractContextManager[None]:
        """Context in which steps run each block in a session of its own."""
        return self._times.each()

    def block_alone(self, block: int, *, pages: int) -> "OnnxStage":
        """Returns a stage of one of the blocks, on the same weights, with `pages` pages of its own. The caller closes
        it."""
        return OnnxStage(
            self.folder,
            block,
            block,
            pages=pages,
            provider=self._provider,
            numerics_id=self.capabilities.numerics_id,
            flavour=self._flavour,
            longest=self._longest,
            small=self._weights.small,
            weights=self._weights,
        )

    def measure_blocks(self) -> None:
        """Measures each block with one token, warm. Writes to page 0, so call it before any run has pages here.

        Does nothing for a stage of one block. Raises ExecutionError if a step fails.
        """
        if self.first_block == self.last_block:
            return
        row, rows = Segment(rows=1, first_position=0, pages=(0,)), self._known_rows(1)
        for _ in range(2):
            self._times.measure_next()
            self.run(Batch(segments=[row], tokens=rows.get("tokens"), hidden=rows.get("hidden"), wanted=[0]))

    def record_steps(self) -> None:
        """Records decode steps of as many shapes as `CapturedSteps.warm` allows, if the stage captures steps."""
        if self.captured is not None:
            with self._lock:
                self.captured.warm()

    def _known_rows(self, count: int) -> dict[str, NDArray[Any]]:
        """Returns `count` known tokens or hidden rows as inputs of the graph, with all of their logits wanted."""
        model = self.folder.model
        rows = {"tokens": fixed_tokens(model, count)} if self.takes_tokens else {"hidden": fixed_rows(model, count)}
        return rows | ({"take": np.arange(count)} if self.gives_logits else {})

    def clean_up(self) -> None:
        """Gives back what is kept for later steps: page sessions and recorded steps now, unused memory of the arena
        after the next step."""
        with self._lock:
            self._pages.clean_up()
            if self.captured is not None:
                self.captured.close()
            self._options = self._provider.shrinking()

    def close(self) -> None:
        """Drops sessions and pages; the executor cannot be used any more. Weights that were passed in stay."""
        if self.captured is not None:
            self.captured.close()
            self.captured = None
        self._times.close()
        if self._selection is not None:
            self._selection.close()
        if self._held:
            self._weights.give_back(self._used)
        self._held.clear()
        self._pages.close()
        del self._session

    def run(self, batch: Batch) -> StageOutput:
        """Runs a batch: see `Executor.run`. Raises ExecutionError for an invalid batch, and for a failed run, with the
        name of the block."""
        segments, given = self._given(batch)
        began = time.perf_counter()
        places = batch_inputs(segments, self._flavour) if self._pages.pools else {}
        started = time.perf_counter()
        inputs = given | places
        estimated, seconds = False, dict[str, float]()
        selection, chosen, finite = self._selection, None, None
        place = None if selection is None or not selection.wants(batch.wanted, batch.needs) else self._provider.place
        stays = None if place is None else {"logits": place}
        try:
            with self._lock:
                if self._times.due:
                    outputs, seconds = self._times.measured(inputs, stays)
                else:
                    repeated = None if self.captured is None else self.captured.step(segments, given, stays)
                    outputs = self._computed(inputs, stays) if repeated is None else repeated
                    estimated = self.first_block < self.last_block
                if selection is not None and stays:
                    empty = np.empty((0, self.folder.model.vocab_size), np.float32)
                    there, outputs["logits"] = outputs["logits"], empty
                    if batch.needs:
                        chosen, finite, down = selection.rows(there, batch.needs)
                        self._pages.down += down
        except Exception as error:  # ONNX Runtime's own exception types have no public common base
            raise self._failed(error) from error
        self._pages.up += sum(array.nbytes for array in inputs.values())
        self._pages.down += sum(array.nbytes for array in outputs.values())
        seconds = seconds or self._times.divided(time.perf_counter() - started)
        rows = outputs["sums"][:, None] if self.gives_logits else outputs["hidden_out"]
        bad = np.logical_not(np.isfinite(rows).all(axis=1, keepdims=True))[:, 0]
        logits = outputs["logits"][: len(batch.wanted)] if self.gives_logits and chosen is None else None
        if logits is not None:
            finite = np.isfinite(logits).all(axis=1)
        if finite is not None:
            bad[np.asarray(batch.wanted, np.intp)[~finite]] = True
        return StageOutput(
            hidden=None if self.gives_logits else outputs["hidden_out"],
            logits=logits,
            rows=chosen,
            not_finite=batch.segments_with(np.flatnonzero(bad)),
            seconds=seconds,
            estimated=estimated,
            kv_s=started - began,
        )

    def first_not_finite(self, batch: Batch) -> BlockFault | None:
        """Finds the first block whose output is NaN or infinite: see `Executor.first_not_finite`. Raises ExecutionError
        as `run` does."""
        segments, given = self._given(batch)
        inputs = given | (batch_inputs(segments, self._flavour) if self._pages.pools else {})
        seconds = dict[str, float]()
        try:
            with self._lock:
                for block, outputs, spent in self._times.one_by_one(inputs):
                    seconds[block] = spent
                    rows = [outputs["hidden_out"]] if "hidden_out" in outputs else [outputs["sums"]]
                    if "logits" in outputs and len(batch.wanted):
                        rows.append(outputs["logits"])
                    if not all(np.isfinite(one).all() for one in rows):
                        return BlockFault(block=block, seconds=seconds)
        except Exception as error:  # ONNX Runtime's own exception types have no public common base
            raise self._failed(error) from error
        return None

    def _given(self, batch: Batch) -> tuple[Sequence[Segment], dict[str, NDArray[Any]]]:
        """Returns the segments as the device takes them, and the graph's inputs that come from the batch itself."""
        model = self.folder.model
        count = check_segments(
            batch.segments, limit=model.max_position, pages=self.pool.pages if self._pages.pools else 0
        )
        given: dict[str, NDArray[Any]] = {}
        if self.takes_tokens:
            given["tokens"] = tokens_of(batch, count, model)
        else:
            given["hidden"] = hidden_of(batch, count, model)
        if self.gives_logits:  # the graph needs one row; without wanted ones only the KV counts
            given["take"] = np.asarray(batch.wanted if len(batch.wanted) else [0], np.int64)
        return batch.segments if self._longest is None else cut(batch.segments, self._longest), given

    def _failed(self, error: Exception) -> ExecutionError:
        block = classify(str(error)).block or f"block_{self.first_block}"
        return ExecutionError(f"{block} failed: {error}", block=block)

    def _computed(self, inputs: Mapping[str, NDArray[Any]], stays: Mapping[str, Place] | None = None) -> Arrays:
        """Returns the outputs of the stage by name; the pools are written in place."""
        outputs = self._session.run(inputs, self._options, stays)
        self._options = None
        return outputs
