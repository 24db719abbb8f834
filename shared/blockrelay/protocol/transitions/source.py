"""The text of a script: the shared numbers, the parts of the library that it needs, and itself."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources

from blockrelay.protocol.constants import LUA
from blockrelay.protocol.number import LOWEST_PROTOCOL, PROTOCOL

NAMES = ("accept", "claim", "commit", "rerun", "finish", "dead", "beat", "plan", "migrate", "forget", "move", "upgrade")
#: The parts that every script needs; the second keeps it from a cell of another protocol.
CELL, FENCE = "cell", "fence"
_FOLDER = resources.files(__name__.rpartition(".")[0]) / "lua"
_NEEDS = re.compile(r"^-- needs: (.*)$", re.M)
_RARELY = re.compile(r"^-- needs rarely: (.*) for (.*)$", re.M)


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

    A part or a script names them in a line `-- needs: this, that`. A script may say `-- needs rarely: this for f, g`:
    then its functions f and g are made, with all that they need, when the first of them is called.
    """
    return (*_always_needed(name), *_rarely_needed(name))


def _always_needed(name: str) -> tuple[str, ...]:
    return _with_their_needs((CELL, FENCE, *_named(_NEEDS, script_text(name))))


def _rarely_needed(name: str) -> tuple[str, ...]:
    known = _always_needed(name)
    return tuple(part for part in _with_their_needs(_named(_RARELY, script_text(name))) if part not in known)


def _with_their_needs(parts: Iterable[str]) -> tuple[str, ...]:
    order: list[str] = []

    def add(part: str) -> None:
        if part not in order:
            for other in _named(_NEEDS, part_text(part)):
                add(other)
            order.append(part)

    for part in parts:
        add(part)
    return tuple(order)


def _named(kind: re.Pattern[str], text: str) -> list[str]:
    return [part for line in kind.finditer(text) for part in line[1].split(", ")]


def _made_when_called(name: str) -> str:
    """The functions that script `name` rarely needs, as stand-ins: the first call of one makes them all."""
    found = _RARELY.search(script_text(name))
    if found is None:
        return ""
    functions = found[2]
    made = f"local function made()\n{''.join(map(part_text, _rarely_needed(name)))}return {functions}\nend\n"
    stand_ins = "".join(
        f"{one} = function(...) {functions} = made() return {one}(...) end\n" for one in functions.split(", ")
    )
    return f"local {functions}\ndo\n{made}{stand_ins}end\n"


@cache
def source(name: str) -> Source:
    """Everything that script `name` needs, and its SHA-1 for EVALSHA."""
    numbers = {"PROTOCOL": PROTOCOL, "LOWEST_PROTOCOL": LOWEST_PROTOCOL, **LUA}
    text = "".join(f"local {constant} = {value}\n" for constant, value in numbers.items())
    text += "".join(map(part_text, _always_needed(name))) + _made_when_called(name) + script_text(name)
    return Source(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
