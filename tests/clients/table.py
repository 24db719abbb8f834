"""The table of `cases.toml`, read. Pure."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
FILE = FOLDER / "cases.toml"
WORKS = "works"


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """`by`: how it is run, `python/openai`, `node/openai` or `curl`, in an `environment` of that language. `cases`:
    rows of the table by name."""

    name: str
    title: str
    by: str
    environment: str
    cases: Mapping[str, Mapping[str, Any]]

    @property
    def works(self) -> int:
        """How many cases do, or are refused as they should be."""
        return sum(row["is"] == WORKS or row.get("right", False) for row in self.cases.values())

    def versions(self) -> list[str]:
        """What is installed for it."""
        language, name = self.by.partition("/")[0], self.environment
        if language == "curl":
            return ["its requests, by curl"]
        if language == "node":
            packages = json.loads((FOLDER / "node" / f"{name}.json").read_text())["dependencies"]
            return [f"{package} {version}" for package, version in packages.items()]
        files = [FOLDER / "python" / f"{name}{kind}.txt" for kind in (".no-deps", "")]
        lines = next(file for file in files if file.exists()).read_text().splitlines()
        return [line.replace("==", " ") for line in lines if "==" in line]


def clients() -> list[Client]:
    """All of them, in the order of the file."""
    table = tomllib.loads(FILE.read_text())
    return [
        Client(
            name=name,
            title=one["title"],
            by=one["by"],
            environment=one.get("environment", one["by"].partition("/")[2]),
            cases=one["cases"],
        )
        for name, one in table.items()
    ]
