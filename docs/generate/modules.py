"""The list of modules in docs/modules.md: the first paragraph of each docstring."""

import ast
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from docs.generate.tables import table

ROOT = Path(__file__).parents[2]
#: What a path in the page begins with -> where that lies. In the order of the page.
ROOTS = {
    "shared": ROOT / "shared" / "blockrelay",
    "gateway": ROOT / "services" / "gateway" / "blockrelay_gateway",
    "scheduler": ROOT / "services" / "scheduler" / "blockrelay_scheduler",
    "worker": ROOT / "services" / "worker" / "blockrelay_worker",
    "native": ROOT / "services" / "worker" / "native",
    "converter": ROOT / "services" / "converter" / "blockrelay_converter",
    "storyteller": ROOT / "services" / "converter" / "storyteller" / "blockrelay_storyteller",
    "launcher": ROOT / "services" / "launcher" / "blockrelay_launcher",
}
#: Around the list in the page.
BEGIN, END = "<!-- modules: made by make docs-pages -->\n", "<!-- end of modules -->"
#: A first sentence of no more characters has the second one beside it.
_SHORT = 60
#: Lines at the head of a script with which its description is over.
_FOR_THE_READER_OF_THE_FILE = re.compile(r"needs:|Keeps |Arguments:|ARGV|Answer:|$")
_COMMENTS = {".lua": "--", ".h": "//", ".cpp": "//"}


def page() -> str:
    """Returns docs/modules.md with a list that is up to date; the rest of the page is written by hand."""
    before, rest = (ROOT / "docs" / "modules.md").read_text().split(BEGIN)
    return f"{before}{BEGIN}{modules()}{rest[rest.index(END) :]}"


def modules() -> str:
    """A heading and a table for each root."""
    parts: list[str] = []
    for name, folder in ROOTS.items():
        rows = [(f"`{name}/{file.relative_to(folder)}`", summary(file)) for file in files(folder)]
        parts.append(f"\n### {name}/\n\n{table(('module', 'what it does'), rows)}")
    return "".join(parts) + "\n"


def files(folder: Path) -> Iterator[Path]:
    """Every module with code in it, packages behind the modules beside them."""
    found = [file for file in folder.rglob("*") if file.suffix in (".py", *_COMMENTS)]
    for file in sorted(
        found, key=lambda file: (*((1, part) for part in file.relative_to(folder).parts[:-1]), (0, file.name))
    ):
        if file.name != "__init__.py" or re.search(r"^(def|class|from) ", file.read_text(), re.M):
            yield file


def summary(file: Path) -> str:
    """The first paragraph of a docstring, the first sentence or two of a comment."""
    text = file.read_text()
    if file.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    mark = _COMMENTS[file.suffix]
    lines = re.match(rf"(?:{mark}.*\n)*", text)
    assert lines is not None
    said = [line.removeprefix(mark).strip() for line in lines[0].splitlines()]
    comment = " ".join(takewhile(lambda line: not _FOR_THE_READER_OF_THE_FILE.match(line), said))
    sentences = re.split(r"(?<=[^.]\.) (?=[A-Z])", comment)
    return " ".join(sentences[: 1 if len(sentences[0]) > _SHORT else 2])
