"""Logs of services that may still write them."""

import json
from pathlib import Path
from typing import Any


def entries(log: Path, event: str = "") -> list[dict[str, Any]]:
    """The entries that are whole, or those of one event. A last line that is not ended yet is none."""
    text = log.read_text()
    found = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line.startswith("{")]
    return [entry for entry in found if event in ("", entry["event_type"])]
