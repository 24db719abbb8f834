"""docs/coming-from.md has every name of the five systems, and whatever it names of ours is there."""

import re
import tomllib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import WebSocketRoute

from blockrelay.onnx_blocks.cache_names import slot_named
from blockrelay_gateway.app import ROUTERS
from docs.generate.modules import ROOTS
from tests.support.code_places import PLACE, is_there
from tests.support.documents import outside_blocks
from tests.support.project import ROOT

PAGE = ROOT / "docs" / "coming-from.md"
NAMES: dict[str, dict[str, Any]] = tomllib.loads((Path(__file__).parent / "source_names.toml").read_text())
#: What other changes bring that were made at the same time. Whatever of it is there by now has to go from here.
COMING = frozenset({
    "blockrelay generate --explain",
    "BLOCKRELAY_GRAPH_MODE", "max-autotune", "reduce-overhead", "enforce-eager", "use-graph-cache",
    "BLOCKRELAY_MAX_RETRY_ATTEMPTS", "error_code",
    "gpu_memory_error", "gpu_timeout", "gpu_device_lost", "gpu_driver_error", "gpu_wrong_numbers",
})  # fmt: skip
_HEADS = ("| there | here |", "|---|---|")
#: A reference to another row of the page.
_SEE = re.compile(r"\bsee `([^`]+)`")


def _generated(name: str) -> str:
    """A page that another test compares with the code."""
    return (ROOT / "docs" / name).read_text()


@cache
def commands() -> dict[str, frozenset[str]]:
    """By the name of each command its options."""
    found: dict[str, frozenset[str]] = {}
    for part in _generated("command-line.md").split("\n## `")[1:]:
        words = part.split("`")[0].split()
        name = " ".join(word for word in words if word == word.lower())
        found[name] = frozenset(re.findall(r"`(--[\w-]+)`", part))
    return found


@cache
def words() -> frozenset[str]:
    """What the code has as a text of its own, as a field, or as a parameter."""
    found: set[str] = set()
    for root in ROOTS.values():
        for file in root.rglob("*.py"):
            text = file.read_text()
            found.update(re.findall(r"""["']([\w.:/-]+)["']""", text), re.findall(r"\b(\w+)(?::|=)", text))
    return frozenset(found)


def is_ours(token: str) -> bool:
    """Whether what the page writes as code is something that there is."""
    if place := PLACE.fullmatch(token):
        return is_there(place[1], place[2] or "")
    if token.startswith("BLOCKRELAY_"):
        return f"| `{token}` |" in _generated("settings.md")
    if re.fullmatch(r"blockrelay_\w+", token):
        return f"| `{token}` |" in _generated("metrics.md")
    if token.startswith("blockrelay "):
        return _is_command(token)
    if token.startswith("python -m "):
        return _is_process(token.split()[2:])
    if re.fullmatch(r"[A-Z]+ /\S*", token):
        return f"\n## `{token}`\n" in _generated("http-api.md")
    if token.startswith("/"):
        sockets = {route.path for router in ROUTERS for route in router.routes if isinstance(route, WebSocketRoute)}
        return token in sockets
    if token.startswith("--"):
        return any(token in options for options in commands().values())
    if device := re.fullmatch(r"(cuda|webgpu|directml|openvino):\w+", token):
        return is_there(f"worker/execution/onnx/providers/{device[1]}.py", "")
    if token.endswith((".key", ".value")):
        return any(slot_named(token, role) is not None for role in ("past", "present"))
    return token in words() or ("/" in token and (ROOT / token).exists())


def _is_command(text: str) -> bool:
    before = text.split(" --")[0]
    name = max((one for one in commands() if f"{before} ".startswith(f"{one} ")), key=len)
    rest = before.removeprefix(name).split()
    if any(word != word.upper() for word in rest):  # neither a command nor what stands for an argument
        return False
    return set(re.findall(r" (--[\w-]+)", text)) <= commands()[name]


def _is_process(parts: list[str]) -> bool:
    """A module that can be run, with the options of its service."""
    settings = [f"`BLOCKRELAY_{one[2:].replace('-', '_').upper()}`" for one in parts if one.startswith("--")]
    return find_spec(parts[0]) is not None and all(one in _generated("settings.md") for one in settings)


def rows() -> dict[tuple[str, str], list[tuple[list[str], str]]]:
    """By heading and heading below it the rows of the tables: names there, and what is here."""
    found: dict[tuple[str, str], list[tuple[list[str], str]]] = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        for part in section.split("\n### "):
            title, below = section.split("\n")[0], part.split("\n")[0]
            for line in part.splitlines():
                if line.startswith("|") and line not in _HEADS:
                    there, here = line.removeprefix("| ").removesuffix(" |").split(" | ")
                    names = [name.strip("`") for name in there.split(", ")]
                    found.setdefault((title, below), []).append((names, here))
    return found


def told(title: str, below: str | None = None) -> list[str]:
    """The names of all rows below a heading."""
    return [
        name for where, found in rows().items() if where[0] == title and below in (None, where[1])
        for names, _ in found for name in names
    ]  # fmt: skip


def every_name() -> frozenset[str]:
    lists = [part for of in NAMES.values() for part in ([of] if "names" in of else of.values())]
    return frozenset(name for part in lists for name in part["names"]) | {name for of in NAMES.values() for name in of}


@pytest.mark.parametrize("title", NAMES)
def test_every_name_of_a_system_has_a_row(title: str) -> None:
    of = NAMES[title]
    expected = {None: of["names"]} if "names" in of else {below: part["names"] for below, part in of.items()}
    for below, names in expected.items():
        found = told(title, below)
        assert set(found) == set(names), below
    assert sum(map(len, expected.values())) == len(told(title)), (
        "a name has several rows, or a table is not in the list"
    )


def test_every_row_names_something_or_says_that_it_is_not_here() -> None:
    for found in rows().values():
        for names, here in found:
            assert "`" in here or "](" in here or "not here" in here, names


def test_whatever_it_names_of_ours_is_there() -> None:
    text = outside_blocks(PAGE)
    cells = [here for found in rows().values() for _, here in found]
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    tokens = {token for cell in cells for token in re.findall(r"`([^`]+)`", _SEE.sub("", cell))}
    tokens |= set(re.findall(r"`([^`]+)`", prose)) - every_name()
    assert len(tokens) > 300
    assert sorted(token for token in tokens - COMING if not is_ours(token)) == []


def test_references_to_other_rows_lead_to_one() -> None:
    for found in rows().values():
        for _, here in found:
            for name in _SEE.findall(here):
                assert name in every_name(), name


def test_nothing_is_said_to_come_that_is_there() -> None:
    assert sorted(token for token in COMING if is_ours(token)) == [], "take it out of COMING"


@pytest.mark.parametrize(
    "token",
    [
        "worker/engine/loop.py Engine.runs",
        "worker/engine/no_such.py",
        "BLOCKRELAY_NO_SUCH",
        "blockrelay_no_such_total",
        "blockrelay no-such",
        "blockrelay plan --no-such",
        "blockrelay devices retries",
        "python -m blockrelay_no_such",
        "python -m blockrelay_worker --no-such",
        "GET /v1/no-such",
        "/v1/no-such",
        "--no-such",
        "directx:0",
        "NO_SUCH_EVENT",
        "no_such_field",
    ],
)
def test_what_is_not_there_is_noticed(token: str) -> None:
    assert not is_ours(token)
