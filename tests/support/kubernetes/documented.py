"""The commands that the documents have for Kubernetes: those of kubectl, and those that need no cluster."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.documents import Block, blocks
from tests.support.project import ROOT

PAGES = (ROOT / "docs" / "kubernetes.md", *sorted((ROOT / "docs" / "procedures").glob("*.md")))
BLOCKS = [block for page in PAGES for block in blocks(page) if block.language == "sh"]
#: The mark of those that tests/deploy runs.
HERE = "here; make check-deploy runs it"


def runnable(page: str) -> list[Block]:
    """The blocks of a page of docs/ that need no cluster, in order."""
    return [block for block in blocks(ROOT / "docs" / page) if block.not_run == HERE]


def command_of(page: str, word: str) -> Block:
    """The one of them in which `word` stands."""
    (found,) = [block for block in runnable(page) if word in block.text]
    return found


def run(block: Block, folder: Path) -> str:
    """What its commands print in `folder`; none may fail."""
    env = {**os.environ, "PATH": f"{os.environ['PATH']}:{Path(sys.executable).parent}"}
    done = subprocess.run(["sh", "-euc", block.text], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
    return done.stdout


def kubectl_calls(block: Block) -> Iterator[list[str]]:
    """The words of each kubectl command of a block."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        command: list[str] = []
        for word in [*words, ";"]:
            if re.fullmatch(r"[();<>|&]+", word):
                if command:
                    yield command
                command = []
            elif command or word == "kubectl":
                command.append(word)
