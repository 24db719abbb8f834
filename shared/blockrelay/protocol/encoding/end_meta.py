"""What the last stage says with the end of a request: JSON in a Commit and in the terminal entry."""

import json
from collections.abc import Mapping
from typing import Any

from blockrelay.protocol.encoding.checks import count, entries, items


def encode_end_meta(meta: Mapping[str, Any]) -> str:
    """`meta` of an EndEntry as it stands in a Commit and in the log.

    Small, since every finished request keeps it: no lists that are empty, and `execution_times` of consecutive blocks
    ({"block_1": seconds}) become whole microseconds.
    """
    meta = {name: value for name, value in meta.items() if value != []}
    times: Mapping[str, float] = meta.get("execution_times") or {}
    names = list(times)
    first = int(names[0].removeprefix("block_")) if names else 0
    if names and names == [f"block_{first + index}" for index in range(len(names))]:
        meta = {name: value for name, value in meta.items() if name != "execution_times"}
        meta["block_us"] = [first, *(round(seconds * 1e6) for seconds in times.values())]
    return json.dumps(meta, separators=(",", ":"))


def decode_end_meta(encoded: bytes) -> dict[str, Any]:
    """The inverse of `encode_end_meta`. Raises what `checks.reading` makes a WireError of."""
    meta = entries(json.loads(encoded)) if encoded else {}
    if "block_us" in meta:
        first, *times = (count(value) for value in items(meta.pop("block_us")))
        meta["execution_times"] = {f"block_{first + index}": us / 1e6 for index, us in enumerate(times)}
    return meta
