"""The policy of a request for a GPU that fails, as text: in its body, and in its record for the scripts."""

import math
from typing import Literal, get_args

from blockrelay.errors import WireError

#: A policy without a limit. "allow": a CPU continues from the KV pages that were copied off the device. "recompute": a
#: CPU computes all tokens again. "deny": the request waits for a GPU and ends with an error when none comes.
Fallback = Literal["allow", "recompute", "deny"]
#: Begins the policy with a limit, `max:2.0`: a CPU continues if the stage is predicted to take at most that many times
#: as long there, else the request ends with an error. The script RERUN reads it too.
_LIMITED = "max:"


def limited_to(max_slowdown: float) -> str:
    """Returns the policy that lets a CPU continue where it is predicted to take at most `max_slowdown` times as long.

    Raises ValueError unless the limit is above 0 and finite.
    """
    if not (0 < max_slowdown < math.inf):  # also for NaN
        raise ValueError(f"a limit is above 0 and finite, not {max_slowdown}")
    return f"{_LIMITED}{float(max_slowdown)!r}"


def checked_policy(value: object) -> str:
    """Returns `value` if it is a policy as services write it. Raises WireError for anything else."""
    if isinstance(value, str):
        if value in get_args(Fallback):
            return value
        prefix, limit = value[: len(_LIMITED)], value[len(_LIMITED) :]
        try:
            if prefix == _LIMITED and limited_to(float(limit)) == value:
                return value
        except ValueError:
            pass
    raise WireError(f"expected {', '.join(get_args(Fallback))} or {_LIMITED}<number>, not {value!r:.40}")
