"""The report of a GPU test: one JSON object, written again after each part."""

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

#: `not here`: the machine lacks what the part needs. `not reached`: the time was up before it began.
Outcome = Literal["passed", "failed", "too slow", "not here", "not reached"]
#: The version of the report's form.
FORM = 1
#: Most lines of a part's output in the report, and most characters of a line.
_LINES, _LINE = 15, 300
_FOLDERS = re.compile(r"(?<![\w/.])/(?:[^/\s'\":]+/)+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a part. It has the figures that the part had when it ended or was killed."""

    part: str
    outcome: Outcome
    seconds: float = 0.0
    limit_s: float = 0.0
    problem: str = ""
    figures: dict[str, Any] = field(default_factory=dict[str, Any])
    said: list[str] = field(default_factory=list[str])
    """The last lines that it printed, if it did not pass."""


@dataclass(slots=True, kw_only=True)
class Report:
    """The report and its file."""

    path: Path
    blockrelay: str
    """The release that is tested."""
    small: bool
    """True for small shapes, which a driver that computes on CPUs can do."""
    machine: dict[str, Any] = field(default_factory=dict[str, Any])
    results: list[Result] = field(default_factory=list[Result])
    seconds: float = 0.0
    """Seconds so far."""
    finished: bool = False
    """True if every part has its result."""

    def content(self) -> dict[str, Any]:
        """Returns the JSON object of the file."""
        return {
            "report": FORM,
            "blockrelay": self.blockrelay,
            "small": self.small,
            "finished": self.finished,
            "seconds": round(self.seconds, 1),
            "machine": self.machine,
            "parts": [asdict(result) for result in self.results],
        }

    def write(self) -> None:
        """Writes the file in place of the one before, whole or not at all."""
        draft = self.path.with_name(f"{self.path.name}.draft")
        draft.write_text(json.dumps(self.content(), indent=1) + "\n")
        os.replace(draft, self.path)


def exit_code(results: list[Result]) -> int:
    """Returns 1 if a part failed, was too slow or was not reached, else 0; a part that is `not here` is no failure."""
    return int(any(result.outcome in ("failed", "too slow", "not reached") for result in results))


def last_lines(text: str) -> list[str]:
    """Returns the last lines that a part printed, without folders in paths."""
    lines = [line for line in text.splitlines() if line.strip()][-_LINES:]
    return [_FOLDERS.sub("", line)[:_LINE] for line in lines]
