"""The file of cells of a test, whose lists come one after the other."""

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class CellFile:
    """`urls`: of the control Redis of each cell; what is put later goes by what they are then."""

    def __init__(self, path: Path, urls: Mapping[str, str]) -> None:
        self.path, self.urls = path, dict(urls)
        self._lists: list[dict[str, Any]] = []

    def put(self, *, cells: tuple[str, ...] | None = None, **weights: int) -> "CellFile":
        """One more list, whose time has come, of `cells` (default: all)."""
        since = datetime.fromtimestamp(time.time() - 1, UTC).isoformat()
        self._lists.append({"version": len(self._lists) + 1, "since": since, "weights": weights})
        where = {name: {"redis_url": self.urls[name]} for name in cells or self.urls}
        self.replace(json.dumps({"cells": where, "lists": self._lists}))
        return self

    def replace(self, text: str) -> None:
        """Make `text` the file in one step: a gateway that reads meanwhile sees the former text or this one."""
        fresh = self.path.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self.path)

    @property
    def version(self) -> int:
        """Of the last list."""
        return len(self._lists)
