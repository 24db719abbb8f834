"""Cuts the blocks of a stage among ranks: which heads, and which columns of each linear layer, each of them computes.

Every matrix of weights is cut by columns. A rank then needs whole rows as the input of its products, which ranks
exchange, and every number is computed by one rank in the same steps as alone: the bits do not depend on the cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.model import ModelConfig
from blockrelay.errors import UsageError
from blockrelay.host.cpu import MAX_RANKS

#: Columns of a panel of packed weights (packed_weights.h): a share of whole panels has no padding.
_PANEL = 32

#: What ranks exchange: outputs of attention, of `o` and `down`, of SwiGLU, and logits.
Exchanged = Literal["heads", "hidden", "mlp", "vocabulary"]


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank computes of every block."""

    heads: range
    """Query heads."""
    kv_heads: range
    """Key and value heads; several ranks have the same one where there are fewer of them than ranks."""
    mlp: range
    """Columns of `gate` and of `up`."""
    hidden: range
    """Columns of `o` and `down`."""
    vocabulary: range
    """Columns of the head."""


@dataclass(frozen=True)
class Cut:
    """The shares of all ranks of a stage, and the rank that this process is."""

    model: ModelConfig
    shares: tuple[Share, ...]
    rank: int = 0

    @property
    def is_whole(self) -> bool:
        """True if there is one rank, which computes everything."""
        return len(self.shares) == 1

    @property
    def mine(self) -> Share:
        """The share of this rank."""
        return self.shares[self.rank]

    @cached_property
    def widths(self) -> dict[Exchanged, NDArray[np.int64]]:
        """Columns of each rank in each matrix that they exchange, int64 [ranks]."""
        dim = self.model.head_dim
        columns: dict[Exchanged, list[int]] = {
            "heads": [len(share.heads) * dim for share in self.shares],
            "hidden": [len(share.hidden) for share in self.shares],
            "mlp": [len(share.mlp) for share in self.shares],
            "vocabulary": [len(share.vocabulary) for share in self.shares],
        }
        return {kind: np.asarray(widths, np.int64) for kind, widths in columns.items()}

    def columns(self, kind: str) -> tuple[range, ...]:
        """Returns this rank's columns of a kind of linear layer (qkv, o, gate_up, down, head)."""
        model, mine = self.model, self.mine
        match kind:
            case "qkv":
                first_key = model.heads
                first_value = first_key + model.kv_heads
                heads = (mine.heads, _moved(mine.kv_heads, first_key), _moved(mine.kv_heads, first_value))
                return tuple(range(each.start * model.head_dim, each.stop * model.head_dim) for each in heads)
            case "gate_up":
                return mine.mlp, _moved(mine.mlp, model.intermediate_size)
            case "head":
                return (mine.vocabulary,)
            case _:
                return (mine.hidden,)

    def own(self, kind: str, matrix: NDArray[Any]) -> NDArray[Any]:
        """Returns this rank's columns of an array [..., N] of a kind of linear layer: a copy, unless it has all."""
        if self.is_whole:
            return matrix
        return np.concatenate([matrix[..., part.start : part.stop] for part in self.columns(kind)], axis=-1)


def whole(model: ModelConfig) -> Cut:
    """Returns the cut of a stage that one process computes alone."""
    return cut(model, 1)


def cut(model: ModelConfig, ranks: int, rank: int = 0) -> Cut:
    """Returns the shares of `ranks` ranks, as even as whole heads and panels of columns let them be.

    Raises UsageError for fewer than one rank, more than MAX_RANKS, and more than the heads of the model allow.
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise UsageError(f"tensor_parallel {ranks}: there must be 1 to {MAX_RANKS} ranks")
    heads = _heads(model, ranks)
    columns = [_parts(count, ranks) for count in (model.intermediate_size, model.hidden_size, model.vocab_size)]
    shares = (
        Share(heads=query, kv_heads=kv, mlp=mlp, hidden=hidden, vocabulary=vocabulary)
        for (query, kv), mlp, hidden, vocabulary in zip(heads, *columns, strict=True)
    )
    return Cut(model, tuple(shares), rank)


def _heads(model: ModelConfig, ranks: int) -> list[tuple[range, range]]:
    """Returns the query heads and the key and value heads of each rank: whole groups, or parts of one group."""
    group = model.heads // model.kv_heads
    if ranks <= model.kv_heads:
        return [(range(kv.start * group, kv.stop * group), kv) for kv in _parts(model.kv_heads, ranks, 1)]
    of_group = _parts(ranks, model.kv_heads, 1)  # ranks that share a key and value head
    if max(map(len, of_group)) > group:
        raise UsageError(
            f"tensor_parallel {ranks}: each rank needs a query head, and {model.name} has {model.heads} in "
            f"{model.kv_heads} groups: take at most {model.heads}"
        )
    return [
        (_moved(part, kv * group), range(kv, kv + 1))
        for kv, members in enumerate(of_group)
        for part in _parts(group, len(members), 1)
    ]


def _parts(count: int, parts: int, unit: int = _PANEL) -> list[range]:
    """Returns 0..count-1 in consecutive ranges of whole units as far as possible, none of them empty."""
    unit = unit if count // unit >= parts else 1
    units = count // unit
    ends = [units * (part + 1) // parts * unit for part in range(parts)]
    ends[-1] = count
    return [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _moved(part: range, by: int) -> range:
    return range(part.start + by, part.stop + by)


def widest(model: ModelConfig, shares: Sequence[Share]) -> int:
    """Returns the most columns of a matrix that one of these ranks computes for the others."""
    return max(
        size
        for share in shares
        for size in (len(share.heads) * model.head_dim, len(share.hidden), len(share.mlp), len(share.vocabulary))
    )
