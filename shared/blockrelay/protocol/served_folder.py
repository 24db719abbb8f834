"""The block folders that a worker can serve under one model's name, as its record describes them.

They are conversions of one checkpoint in several precisions. The model's key in Redis is that of the folder with which
the services started; the plan says which folder each worker serves.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFolder:
    """A block folder that a worker can serve, and what its present stage would need of it."""

    key: str
    """The first digits of its manifest's hash (`BlockFolder.model_key`)."""
    precision: str
    """The precisions of its blocks as text: `w8a8`, or `w8a8,block_33=fp32`."""
    kv_cache_layout: str
    """The numbers in its KV pages: `fp16` or `fp32`."""
    numerics: str
    """The worker's numerics id with it."""
    bytes: int = 0
    """What the worker's stage needs: its weights, and KV pages for one request of full length."""


def folders_to_json(folders: Sequence[ServedFolder]) -> str:
    """Returns the text that a worker's record holds; `folders_from_json` reads it."""
    return json.dumps([asdict(folder) for folder in folders], sort_keys=True)


def folders_from_json(content: bytes | None) -> tuple[ServedFolder, ...]:
    """Reads the folders of a worker's record, without what a later release may add.

    None from a worker of a release that did not write them, and none where they cannot be read.
    """
    try:
        entries = cast(list[Any], json.loads(content or b"[]"))
        return tuple(map(_folder, entries))
    except (ValueError, TypeError, KeyError):
        return ()


def _folder(entry: Any) -> ServedFolder:
    """Reads one folder. Raises ValueError, TypeError or KeyError for anything else."""
    texts = {name: entry[name] for name in ("key", "precision", "kv_cache_layout", "numerics")}
    if not all(isinstance(text, str) for text in texts.values()):
        raise ValueError
    return ServedFolder(**texts, bytes=int(entry["bytes"]))
