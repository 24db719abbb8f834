"""Weighted rendezvous hashing: all gateways rank the cells of a list alike, and a changed list moves few requests.

Each cell draws u in (0, 1) from a hash of its name and the request's name; the highest -weight / ln(u) comes first, so
that a cell is first for its share of the weights. One more cell takes 1/n from the others and moves nothing between
them. Source: Schindelhauer and Schomaker, "Weighted Distributed Hash Tables", SPAA 2005 (the logarithmic method).
"""

import hashlib
import math
from collections.abc import Mapping


def ranked(name: str, weights: Mapping[str, int]) -> list[str]:
    """The cells with a weight above 0, ranked for `name`: the first is its cell, the others replace it in order."""
    open_cells = [cell for cell, weight in weights.items() if weight > 0]
    return sorted(open_cells, key=lambda cell: (_score(cell, weights[cell], name), cell), reverse=True)


def _score(cell: str, weight: int, name: str) -> float:
    drawn = int.from_bytes(hashlib.blake2b(f"{cell}\0{name}".encode(), digest_size=6).digest(), "big")
    return -weight / math.log((drawn + 0.5) / 2**48)
