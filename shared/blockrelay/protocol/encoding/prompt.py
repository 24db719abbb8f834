"""Token ids of a prompt as few bytes: it is kept as long as what came of it."""

from typing import cast

import numpy as np
import numpy.typing as npt

from blockrelay.errors import WireError
from blockrelay.protocol.encoding.checks import MAX_TOKEN

TokenIds = npt.NDArray[np.int32]


def pack_prompt(prompt: TokenIds) -> tuple[bytes, int]:
    """So many little-endian bytes for each token, as few as hold them all; and how many."""
    width = max(1, (int(prompt.max()).bit_length() + 7) // 8)
    octets = np.ascontiguousarray(prompt, "<u4").view(np.uint8).reshape(-1, 4)
    return octets[:, :width].tobytes(), width


def unpack_prompt(octets: object, width: object) -> TokenIds:
    """Token ids from `width` little-endian bytes each, or from an array, as they were sent before. Raises WireError."""
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
        raise WireError("a request body has a token id that is none")
    return ids.astype(np.int32)
