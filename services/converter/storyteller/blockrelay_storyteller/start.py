"""Sets the initial weights of training, with which the first two layers can already look something up.

To answer a question, the model must find a name again and copy a word near it. From random weights a model this small
needs a hundred times our tokens to learn that. Therefore the first layer starts with heads that look 1 to 4 tokens
back. The second starts with heads that find the places where the same token stood before and copy what is there.
The weights contain no knowledge of words, and training may change all of them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of the model. `heads * head_dim` need not equal `hidden`.

    The initial weights need two layers or more; six query heads or more, two for each kv head; an even `head_dim` of
    14 or more; and `hidden` above `4 * head_dim`.
    """

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


#: Component 0 of every embedding: the same for all tokens, so that queries and keys can be constant vectors.
_CONSTANT = 2.0
_EMBEDDING_STD = 0.5
_HEAD_STD = 0.01
#: Number of fast rotary pairs (they come first): these tell neighbours apart, the others hardly turn in a whole story.
_FAST_PAIRS = 6
#: Query and key entries per unit of the constant, large enough that a head puts most of its weight on one token.
_BACK_STRENGTH = 1.5
_WRITE_STRENGTH = 2.0
_MATCH_STRENGTH = 0.75
_COPY_STRENGTH = 2.0
#: Pairs of heads: (query head, distance back to its subject, kv head, distance from the matching token back to the
#: same subject). In "The ball is with" the ball is 2 back; in "the ball was with Mia" it is 3 back from Mia.
_MATCHES = ((0, 3, 0, 4), (1, 2, 0, 4), (2, 2, 1, 3), (3, 3, 1, 3), (4, 1, 2, 2), (5, 2, 2, 2))


def embedding_and_head(embedding: Tensor, head: Tensor) -> None:
    """Fills the embedding and the head, both [vocab, hidden], in place. Call it under `torch.no_grad`.

    The head begins as a small copy of the embedding, so that a token that attention copies gets a larger logit.
    """
    nn.init.normal_(embedding, std=_EMBEDDING_STD)
    head.copy_(embedding * (_HEAD_STD / _EMBEDDING_STD))
    embedding[:, 0] = _CONSTANT
    head[:, 0] = 0


def look_back(q: Tensor, k: Tensor, v: Tensor, o: Tensor, shape: Shape) -> list[Tensor]:
    """Changes the first layer's projections in place: query heads 0 to 3 copy the tokens 1 to 4 positions back.

    `q`, `k`, `v` and `o` are weights [outputs, inputs]; `v` is filled at random before. Call it under `torch.no_grad`.

    A head attends `d` back if its key is a fixed vector and its query is the same vector turned back by `d` steps:
    after the rotary embedding their dot product is largest at that distance. All values are one random projection of
    the token. Returns one matrix for each head: the directions [hidden, head_dim] in which it writes the token.
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
    """Changes the second layer's projections in place: six heads find a token again and copy one that followed it.

    `q`, `k`, `v` and `o` are weights [outputs, inputs], `written` is the result of `look_back`. Call it under
    `torch.no_grad`. Each head has a subject: the token 1 to 3 positions back. It attends to a position that has the
    same token 2 to 4 positions back, and copies the token at that position. The score is the dot product of the two
    tokens as the first layer wrote them, set in the slow rotary pairs only.
    """
    half, size = shape.head_dim // 2, shape.head_dim
    slow = torch.cat((torch.arange(_FAST_PAIRS, half), torch.arange(half + _FAST_PAIRS, size)))
    for head, subject_back, group, found_back in _MATCHES:
        q[head * size + slow] = _MATCH_STRENGTH * written[subject_back - 1].T[slow]
        k[group * size + slow] = _MATCH_STRENGTH * written[found_back - 1].T[slow]
        of_group = slice(group * size, (group + 1) * size)
        v[of_group, 0] = 0
        o[:, head * size : (head + 1) * size] = _COPY_STRENGTH * v[of_group].T
