"""The text of a script: the shared numbers, the parts of the library that it needs, and itself."""

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from blockrelay.protocol.constants import LUA
from blockrelay.protocol.number import PROTOCOL

NAMES = ("accept", "claim", "commit", "rerun", "finish", "dead", "beat", "plan", "migrate", "forget", "upgrade")
#: The parts that every script needs; the second keeps it from a cell of another protocol.
CELL, FENCE = "cell", "fence"
#: It changes what the protocol of the cell is.
UNFENCED = "upgrade"
_FOLDER = resources.files(__name__.rpartition(".")[0]) / "lua"
_NEEDS = re.compile(r"^-- needs: (.*)$", re.M)


@dataclass(frozen=True, slots=True)
class Source:
    text: str
    sha: str


def part_text(part: str) -> str:
    """The text of a part of the library, `cell` or `folder/name`."""
    return (_FOLDER / "lib" / f"{part}.lua").read_text()


def script_text(name: str) -> str:
    """The text of a script alone."""
    return (_FOLDER / f"{name}.lua").read_text()


def parts_of(name: str) -> tuple[str, ...]:
    """The parts of the library that script `name` needs, each behind those that it needs itself.

    A part or a script names them in a line `-- needs: this, that`.
    """
    order: list[str] = []

    def add(part: str) -> None:
        if part not in order:
            for other in _needed(part_text(part)):
                add(other)
            order.append(part)

    always = (CELL,) if name == UNFENCED else (CELL, FENCE)
    for part in (*always, *_needed(script_text(name))):
        add(part)
    return tuple(order)


def _needed(text: str) -> list[str]:
    return [part for line in _NEEDS.findall(text) for part in line.split(", ")]


@cache
def source(name: str) -> Source:
    """Everything that script `name` needs, and its SHA-1 for EVALSHA."""
    numbers = {"PROTOCOL": PROTOCOL, **LUA}
    text = "".join(f"local {constant} = {value}\n" for constant, value in numbers.items())
    text += "".join(map(part_text, parts_of(name))) + script_text(name)
    return Source(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
