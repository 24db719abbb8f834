"""The report of a proof on a GPU: one JSON object, written again after each part."""

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

#: `not here`: the machine lacks what the part needs. `not reached`: the time was up.
Outcome = Literal["passed", "failed", "too slow", "not here", "not reached"]
#: Raised with every change of the form.
FORM = 1
#: Lines and characters of what a part has printed that go into the report.
_LINES, _LINE = 15, 300
_FOLDERS = re.compile(r"(?<![\w/.])/(?:[^/\s'\":]+/)+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a part. `figures` are those that it had when it ended, also where it was ended."""

    part: str
    outcome: Outcome
    seconds: float = 0.0
    limit_s: float = 0.0
    problem: str = ""
    figures: dict[str, Any] = field(default_factory=dict[str, Any])
    said: list[str] = field(default_factory=list[str])
    """The end of what it printed, of one that did not pass."""


@dataclass(slots=True, kw_only=True)
class Report:
    """`small`: with small shapes, so that a driver without a GPU can do it. `finished`: every part has its result."""

    path: Path
    blockrelay: str
    small: bool
    machine: dict[str, Any] = field(default_factory=dict[str, Any])
    results: list[Result] = field(default_factory=list[Result])
    seconds: float = 0.0
    finished: bool = False

    def content(self) -> dict[str, Any]:
        """The report as a JSON object, as it is written into its file."""
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
        """Write the report in place of the one before, whole or not at all."""
        draft = self.path.with_name(f"{self.path.name}.draft")
        draft.write_text(json.dumps(self.content(), indent=1) + "\n")
        os.replace(draft, self.path)


def exit_code(results: list[Result]) -> int:
    """0 if nothing failed and nothing was too slow; what a machine does not have is no failure."""
    return int(any(result.outcome in ("failed", "too slow", "not reached") for result in results))


def last_lines(text: str) -> list[str]:
    """The end of what a part printed, without folders."""
    lines = [line for line in text.splitlines() if line.strip()][-_LINES:]
    return [_FOLDERS.sub("", line)[:_LINE] for line in lines]
