"""Finds sentences that docs/style.md refuses: `python -m tests.support.plain_words [FOLDER ...]`.

Looks at docstrings and comments, prints one line `FILE:LINE: what` for each, and exits with 1 if there is any. `make
check` runs it over the product.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("shared", "services", "bench", "deploy")
#: Words that begin a sentence which needs its neighbours to be understood.
OPENINGS = ("Of", "Those", "Where", "By", "As", "So", "Somebody", "Someone", "Whoever", "Nobody")
PHRASES = ("somebody", "someone", "whoever", "anew", "so many", "told of", "tells of", "what is told of")

_OPENING = re.compile(rf"\s*({'|'.join(OPENINGS)})\b")
_PHRASE = re.compile(rf"\b({'|'.join(PHRASES)})\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One refused word: its line, counted from 1, and what is wrong with it."""

    line: int
    problem: str


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of each docstring of a module, class, function, and of each string behind a field."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in node.body:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text
                case _:
                    pass


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of each comment, without its hash sign."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: ")


def findings(source: str) -> list[Finding]:
    """Returns what docs/style.md refuses in one Python file, by line."""
    found: list[Finding] = []
    for line, text in docstrings(source):
        if opening := _OPENING.match(text):
            found.append(Finding(line, f"a docstring begins with {opening[1]!r}"))
    for line, text in (*docstrings(source), *comments(source)):
        found += [Finding(line + text.count("\n", 0, at.start()), f"{at[1]!r}") for at in _PHRASE.finditer(text)]
    return sorted(found)


def files_of(folders: Sequence[str]) -> list[Path]:
    """Returns the Python files below `folders` of the checkout."""
    return [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


def main() -> int:
    """Prints the findings of the product, or of the folders that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", help="below the checkout; default: the product")
    folders = parser.parse_args().folders
    count = 0
    for file in files_of(folders or PRODUCT):
        for finding in findings(file.read_text()):
            sys.stdout.write(f"{file.relative_to(ROOT)}:{finding.line}: {finding.problem}\n")
            count += 1
    if count:
        sys.stdout.write(f"{count} sentences to rewrite: docs/style.md says how\n")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
