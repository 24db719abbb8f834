"""How to combine one metric's values from several processes: their sum, or their maximum."""

from typing import Literal

#: Counters that Redis keeps for the whole cell. Every process that exports them has the same value.
BOOKS = ("blockrelay_accepted", "blockrelay_ended", "blockrelay_reruns", "blockrelay_worker_deaths")
#: Gauges of one process although no service is in their name.
_OF_ONE_PROCESS = ("blockrelay_state", "blockrelay_build")
_OURS, _PREFIXES = "blockrelay_", ("blockrelay_worker_", "blockrelay_gateway_", "blockrelay_tenant_")


def taken(family: str, kind: str) -> Literal["sum", "max", ""]:
    """Returns how values of one metric from several processes are combined; "" for a metric without `blockrelay_`.

    "max" is for values that are the same in every process. `family` is the metric's name without `_total` or another
    suffix, `kind` its type: counter, gauge, histogram, summary or info.
    """
    if not family.startswith(_OURS):
        return ""
    if family in BOOKS:
        return "max"
    return "max" if kind == "gauge" and family not in _OF_ONE_PROCESS and not family.startswith(_PREFIXES) else "sum"
