"""Where training starts: weights in which the first two layers can already look something up.

To answer is to find a name again and to tell what stands after it. From random weights a model this small needs a
hundred times our tokens to find that out. So the first layer starts with heads that look 1 to 4 tokens back, the second
with heads that look for the places where the same token stood before, and copy what is there. Training does the rest:
nothing here knows a word, and every weight stays free to change.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the model. `heads * head_dim` need not equal `hidden`."""

    vocab: int = 2048
    hidden: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    mlp: int = 512
    positions: int = 1024
    theta: float = 100000.0
    epsilon: float = 1e-5


#: Component 0 of every embedding says nothing about the token: queries and keys can rely on it.
_CONSTANT = 2.0
_EMBEDDING_STD = 0.5
_HEAD_STD = 0.01
#: Rotary pairs, fastest first. The first ones tell neighbours apart, the later ones hardly turn over a whole story.
_FAST_PAIRS = 6
#: Query and key entries per unit of the constant: the head puts most of its weight on one token.
_BACK_STRENGTH = 1.5
_WRITE_STRENGTH = 2.0
_MATCH_STRENGTH = 0.75
_COPY_STRENGTH = 2.0
#: (query head, how far its subject is back, kv head, how far the subject of the found token is back). "The ball is
#: with ...": the ball is 2 back; "the ball was with Mia": seen from Mia it is 3 back.
_MATCHES = ((0, 3, 0, 4), (1, 2, 0, 4), (2, 2, 1, 3), (3, 3, 1, 3), (4, 1, 2, 2), (5, 2, 2, 2))


def embedding_and_head(embedding: Tensor, head: Tensor) -> None:
    """Fills both [vocab, hidden] in place. The head begins as a small copy: what attention finds is a candidate."""
    nn.init.normal_(embedding, std=_EMBEDDING_STD)
    head.copy_(embedding * (_HEAD_STD / _EMBEDDING_STD))
    embedding[:, 0] = _CONSTANT
    head[:, 0] = 0


def look_back(q: Tensor, k: Tensor, v: Tensor, o: Tensor, shape: Shape) -> list[Tensor]:
    """Changes the first layer's projections in place: query heads 0 to 3 pass on the tokens 1 to 4 back.

    A head attends `d` back if its key is a fixed vector and its query the same one turned back by `d` steps: after the
    rotary embedding their product is largest at that distance. All values are one random projection of the token;
    returned are the directions [hidden, head_dim] in which each head writes it.
    """
    half, size, hidden = shape.head_dim // 2, shape.head_dim, shape.hidden
    rate = shape.theta ** (-torch.arange(_FAST_PAIRS, dtype=torch.float32) / half)
    basis = torch.linalg.qr(torch.randn(hidden - 1, 4 * size)).Q * _WRITE_STRENGTH
    written: list[Tensor] = []
    for head in range(4):
        turn = rate * (head + 1)
        rows = slice(head * size, (head + 1) * size)
        q[rows] = 0
        q[head * size : head * size + _FAST_PAIRS, 0] = _BACK_STRENGTH * turn.cos()
        q[head * size + half : head * size + half + _FAST_PAIRS, 0] = -_BACK_STRENGTH * turn.sin()
        group = head * shape.kv_heads // shape.heads
        of_group = slice(group * size, (group + 1) * size)
        k[of_group] = 0
        k[group * size : group * size + _FAST_PAIRS, 0] = _BACK_STRENGTH
        v[of_group] = v[:size]
        v[of_group, 0] = 0
        o[0, rows] = 0
        o[1:, rows] = basis[:, rows]
        written.append(o[:, rows].clone())
    return written


def match(q: Tensor, k: Tensor, v: Tensor, o: Tensor, written: list[Tensor], shape: Shape) -> None:
    """Changes the second layer's projections in place: heads attend where their subject stood, and copy that token.

    The score is the product of two tokens as the first layer wrote them, in the slow rotary pairs only.
    """
    half, size = shape.head_dim // 2, shape.head_dim
    slow = torch.cat((torch.arange(_FAST_PAIRS, half), torch.arange(half + _FAST_PAIRS, size)))
    for head, subject_back, group, found_back in _MATCHES:
        q[head * size + slow] = _MATCH_STRENGTH * written[subject_back - 1].T[slow]
        k[group * size + slow] = _MATCH_STRENGTH * written[found_back - 1].T[slow]
        of_group = slice(group * size, (group + 1) * size)
        v[of_group, 0] = 0
        o[:, head * size : (head + 1) * size] = _COPY_STRENGTH * v[of_group].T
