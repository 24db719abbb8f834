"""The layout of what the native sampler reads and writes: one record for each row of logits."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from blockrelay.errors import ExecutionError
from blockrelay_worker.kernels.arguments import F64, FLOAT64, I64, INT64, check

#: `SampledRow` of sampling.h. `logits` (float32), `allowed` (uint32), `changed` (int64) and `replacement` (float64) are
#: addresses, 0 for none. `token` and `logprob` are results: an index into the logits, -1 where no token is allowed.
SAMPLED_ROW: Final = np.dtype(
    [
        *((name, np.uint64) for name in ("logits", "allowed", "changed", "replacement")),
        ("changes", np.int64),
        ("count", np.int64),
        ("seed", np.uint64),
        ("position", np.uint64),
        *((name, np.float64) for name in ("temperature", "top_p", "min_p", "total")),
        ("top_k", np.int64),
        ("logprobs", np.int64),
        ("token", np.int64),
        ("logprob", np.float64),
    ]
)


def check_sampled(rows: NDArray[Any], ids: I64, logprobs: F64) -> None:
    """Raises ExecutionError unless `rows` [R] are SAMPLED_ROWs, `ids` int64 [R, W] and `logprobs` float64 [R, W]."""
    check("rows", rows, SAMPLED_ROW, (rows.size,))
    if ids.ndim != 2:
        raise ExecutionError(f"kernel argument ids: expected a matrix, got {list(ids.shape)}")
    check("ids", ids, INT64, (rows.size, ids.shape[1]))
    check("logprobs", logprobs, FLOAT64, ids.shape)
