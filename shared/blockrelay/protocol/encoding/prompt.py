"""Packs the token ids of a prompt into few bytes, since Redis keeps a prompt as long as its result."""

from typing import cast

import numpy as np
import numpy.typing as npt

from blockrelay.errors import WireError
from blockrelay.protocol.encoding.checks import MAX_TOKEN

TokenIds = npt.NDArray[np.int32]


def pack_prompt(prompt: TokenIds) -> tuple[bytes, int]:
    """Returns the token ids of a prompt (int32 [n], n >= 1) as little-endian bytes, and how many bytes each has.

    Each has as few as the largest id needs.
    """
    width = max(1, (int(prompt.max()).bit_length() + 7) // 8)
    octets = np.ascontiguousarray(prompt, "<u4").view(np.uint8).reshape(-1, 4)
    return octets[:, :width].tobytes(), width


def unpack_prompt(octets: object, width: object) -> TokenIds:
    """Returns the token ids that `pack_prompt` packed into `octets`, with `width` bytes each.

    `octets` may also be an int32 array, which is returned as it is; `width` then counts for nothing. Raises WireError
    for anything else, for no ids at all, and for an id above MAX_TOKEN.
    """
    if isinstance(octets, np.ndarray) and octets.dtype == np.int32 and octets.ndim == 1 and octets.size:
        return cast(TokenIds, octets)
    if type(octets) is not bytes or type(width) is not int or not 1 <= width <= 4:
        raise WireError("a request body needs a prompt of token ids")
    if not octets or len(octets) % width:
        raise WireError(f"{len(octets)} bytes are not a prompt of token ids of {width} bytes")
    wide = np.zeros((len(octets) // width, 4), np.uint8)
    wide[:, :width] = np.frombuffer(octets, np.uint8).reshape(-1, width)
    ids = wide.reshape(-1).view("<u4")
    if int(ids.max()) > MAX_TOKEN:
        raise WireError(f"a request body has a token id above {MAX_TOKEN}")
    return ids.astype(np.int32)
