"""What benchmark tools are compared with: the tokens that the gateway counts."""

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tests.clients.python.harness import Target


@dataclass(slots=True)
class Tokens:
    """Of prompts and of answers."""

    prompt: int
    new: int


def counted(target: Target) -> Tokens:
    """By the gateway, since it started."""
    with urllib.request.urlopen(f"{target.url}/metrics") as answer:
        text = answer.read().decode()

    def value(name: str) -> int:
        return int(sum(float(found) for found in re.findall(rf"^{name}_total{{.*}} (\S+)$", text, re.MULTILINE)))

    return Tokens(value("blockrelay_prompt_tokens"), value("blockrelay_generation_tokens"))


@contextmanager
def counting(target: Target) -> Iterator[Tokens]:
    """Filled with what the gateway counts meanwhile."""
    before, found = counted(target), Tokens(0, 0)
    yield found
    after = counted(target)
    found.prompt, found.new = after.prompt - before.prompt, after.new - before.new


def command(*arguments: str, of: Sequence[str]) -> None:
    """Runs a tool of this environment; raises RuntimeError with its last words."""
    # Datasets and tokenizers are on this disk; asking a hub for them takes minutes where there is none.
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-m", *of, *arguments], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip()[-300:])
