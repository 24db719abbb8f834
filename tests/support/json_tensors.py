"""Tensors in the JSON of clients."""

import base64
from typing import Any

from numpy.typing import NDArray


def json_tensor(array: NDArray[Any]) -> dict[str, Any]:
    """Returns `array` as a JSON tensor with `data_b64`, as clients send it."""
    data = base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()
    return {"_tensor_": True, "dtype": array.dtype.name, "shape": list(array.shape), "data_b64": data}
