"""Drives stages by hand: the shortest thing that can run a model, for tests of the executor."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.cpu.linears import Backend
from blockrelay_worker.execution.cpu.stage import StageExecutor
from blockrelay_worker.execution.ranks.group import RankGroup
from blockrelay_worker.execution.ranks.shares import cut
from blockrelay_worker.execution.self_test import first_mismatch
from blockrelay_worker.kernels import load_kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One request's share of a batch: its tokens, where they stand, its pages in every stage."""

    tokens: Sequence[int]
    first_position: int
    pages: Sequence[int]


_RIGHT: dict[Path, Backend] = {}


def _right_variant(folder: BlockFolder) -> Backend:
    """By known answer, as workers choose: uint8 x int8 saturates on CPUs with AVX2 and without VNNI."""
    if folder.root not in _RIGHT:
        blocks, kernels = folder.model.blocks, load_kernels(1)
        stage = StageExecutor(folder, 1, blocks, pages=4, threads=1, kernels=kernels, backend="u8s8")
        _RIGHT[folder.root] = "u8s8" if first_mismatch(stage) is None else "u8u8"
        stage.close()
    return _RIGHT[folder.root]


class Chain:
    """A model cut into stages that run one after the other. `ends` are the last blocks of the stages."""

    def __init__(
        self,
        folder: BlockFolder,
        ends: Sequence[int] | None = None,
        *,
        threads: int = 1,
        variant: Backend | None = None,
        pages: int = 200,
        ranks: int = 1,
    ) -> None:
        """`variant`: of the products; default: the fastest of ONNX Runtime's that is right on this machine.

        Each stage is shared by `ranks` processes; `close` ends them.
        """
        ends = ends or [folder.model.blocks]
        starts = [1, *(end + 1 for end in ends[:-1])]
        self.stages: list[StageExecutor] = []
        variant = variant or _right_variant(folder)
        kernels = load_kernels(threads)
        for first, last in zip(starts, ends, strict=True):
            group = None
            if ranks > 1:
                group = RankGroup(
                    folder, cut(folder.model, ranks),
                    first=first, last=last, pages=pages, threads=threads, kernels=kernels,
                )  # fmt: skip
            stage = StageExecutor(
                folder, first, last, pages=pages, threads=threads, kernels=kernels, backend=variant, group=group
            )
            for array in (*stage.memory.k_pages, *stage.memory.v_pages):
                array.fill(np.nan)  # whoever reads what he did not write shows it
            self.stages.append(stage)

    def run(self, parts: Sequence[Part], wanted: Sequence[int] | None = None) -> NDArray[np.float32]:
        """Logits of the rows `wanted` of the batch (default: of every row), copied."""
        tokens = np.array([token for part in parts for token in part.tokens], np.int32)
        segments = [Segment(rows=len(p.tokens), first_position=p.first_position, pages=p.pages) for p in parts]
        hidden = None
        for stage in self.stages:
            output = stage.run(
                Batch(
                    segments=segments,
                    tokens=tokens if stage.takes_tokens else None,
                    hidden=hidden,
                    wanted=(range(tokens.size) if wanted is None else wanted) if stage.gives_logits else (),
                )
            )
            assert output.not_finite == ()
            hidden = output.hidden
            if output.logits is not None:
                return output.logits.copy()
        raise AssertionError("no stage holds the head")

    def close(self) -> None:
        for stage in self.stages:
            stage.close()

    def solo(
        self, tokens: Sequence[int], chunks: Sequence[int] | None = None, first_page: int = 0
    ) -> NDArray[np.float32]:
        """Logits of every position of one request, run in chunks of these sizes (default: one token at a time)."""
        pages = list(range(first_page, first_page + -(-len(tokens) // 16)))
        rows: list[NDArray[np.float32]] = []
        position = 0
        for size in chunks or [1] * len(tokens):
            part = Part(tokens=tokens[position : position + size], first_position=position, pages=pages)
            rows.append(self.run([part]))
            position += size
        assert position == len(tokens)
        return np.concatenate(rows)
