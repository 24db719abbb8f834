"""Whose a metric is: whether what processes tell is added up, or every one tells the same of the whole cell."""

from typing import Literal

#: Counters that Redis keeps for the cell, whoever has counted.
BOOKS = ("blockrelay_accepted", "blockrelay_ended", "blockrelay_reruns", "blockrelay_worker_deaths")
#: Gauges of one process although no service is in their name.
_OF_ONE_PROCESS = ("blockrelay_state", "blockrelay_build")
_OURS, _PREFIXES = "blockrelay_", ("blockrelay_worker_", "blockrelay_gateway_", "blockrelay_tenant_")


def taken(family: str, kind: str) -> Literal["sum", "max", ""]:
    """How the values of a family's processes make one: added up, or any of them (the largest); "" for what is not ours.

    `family`: its name without `_total` or another ending. `kind`: counter, gauge, histogram, summary or info.
    """
    if not family.startswith(_OURS):
        return ""
    if family in BOOKS:
        return "max"
    return "max" if kind == "gauge" and family not in _OF_ONE_PROCESS and not family.startswith(_PREFIXES) else "sum"
