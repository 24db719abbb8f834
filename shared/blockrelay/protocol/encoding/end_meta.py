"""The JSON with which the last stage describes the end of a request, in a Commit and in the terminal entry."""

import json
from collections.abc import Mapping
from typing import Any

from blockrelay.protocol.encoding.checks import count, entries, items


def encode_end_meta(meta: Mapping[str, Any]) -> str:
    """Returns the `meta` of an EndEntry as JSON for a Commit and the log.

    Small, since each finished request keeps it: it leaves out empty lists, and turns `execution_times` of consecutive
    blocks ({"block_1": seconds}) into a list of whole microseconds.
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
    """Returns the dict that `encode_end_meta` encoded, without its empty lists and with times rounded to microseconds.

    Returns {} for no bytes. Call it inside `checks.reading`, which makes WireErrors.
    """
    meta = entries(json.loads(encoded)) if encoded else {}
    if "block_us" in meta:
        first, *times = (count(value) for value in items(meta.pop("block_us")))
        meta["execution_times"] = {f"block_{first + index}": us / 1e6 for index, us in enumerate(times)}
    return meta
