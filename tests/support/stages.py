"""Drives stages by hand: the shortest thing that can run a model, for tests of the executor."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.cpu.linears import Variant
from blockrelay_worker.execution.cpu.stage import StageExecutor
from blockrelay_worker.kernels import load_kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One request's share of a batch: its tokens, where they stand, its pages in every stage."""

    tokens: Sequence[int]
    first_position: int
    pages: Sequence[int]


class Chain:
    """A model cut into stages that run one after the other. `ends` are the last blocks of the stages."""

    def __init__(
        self,
        folder: BlockFolder,
        ends: Sequence[int] | None = None,
        *,
        threads: int = 1,
        variant: Variant = "u8s8",
        pages: int = 200,
    ) -> None:
        ends = ends or [folder.model.blocks]
        starts = [1, *(end + 1 for end in ends[:-1])]
        self.stages: list[StageExecutor] = []
        for first, last in zip(starts, ends, strict=True):
            stage = StageExecutor(
                folder, first, last, pages=pages, threads=threads, kernels=load_kernels(threads), variant=variant
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
