"""The documents: README.md and its like, the pages of docs/, and the code blocks in them."""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.support.project import ROOT

#: Documents that people read from the beginning; others (deploy/redis/README.md) belong to their folder.
DOCUMENTS = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
#: The languages of blocks that somebody may paste and run.
COMMANDS = ("sh", "bash", "python")
#: What puts the environment's programs onto the path.
ACTIVATION = ". .venv/bin/activate"
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_MARK = re.compile(r"<!-- not run: ([^>]+) -->\n\Z")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. `not_run` is the reason in the comment above it, or empty."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a document, in order."""
    text = page.read_text()
    found: list[Block] = []
    for fence in _FENCE.finditer(text):
        mark = _MARK.search(text, 0, fence.start())
        line = text.count("\n", 0, fence.start()) + 1
        found.append(Block(page, line, fence[1], fence[2], mark[1] if mark else ""))
    return found


def outside_blocks(page: Path) -> str:
    """The text of a document without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def activated(page: Path, line: int) -> bool:
    """Whether a reader who comes down a document to this line has read how `blockrelay` comes onto the path: there, or
    on the index of its folder."""
    before = "\n".join(page.read_text().splitlines()[: line - 1])
    index = page.with_name("index.md")
    others = index.read_text() if page.parent.name in ("procedures", "runbooks") and index.exists() else ""
    return ACTIVATION in before or ACTIVATION in others


def anchors(page: Path) -> set[str]:
    """What a link into a document may name: its headings."""
    titles = re.findall(r"^#+ (.*)$", outside_blocks(page), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
