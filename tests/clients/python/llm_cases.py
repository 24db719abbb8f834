"""The `llm` command, with a model of a server like OpenAI's."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clients.python.harness import Target, case, run

MODELS = """
- model_id: served
  model_name: {model}
  api_base: {base}
  supports_schema: true
  supports_tools: true
"""


class Refused(Exception):
    """The command's last line; its text holds what the gateway said."""

    def __init__(self, said: str) -> None:
        super().__init__(said)
        found = said.partition("Error code: ")[2][:3]
        self.status_code = int(found) if found.isdigit() else 0


def llm(target: Target, *arguments: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "extra-openai-models.yaml").write_text(MODELS.format(model=target.model, base=target.base))
        done = subprocess.run(
            [sys.executable, "-m", "llm", *arguments],
            env={**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "unused"},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    if done.returncode:
        raise Refused(done.stderr.strip().splitlines()[-1])
    return done.stdout


@case
def models(target: Target) -> None:
    assert "served" in llm(target, "models")


@case
def prompt(target: Target) -> None:
    assert llm(target, "-m", "served", "-o", "max_tokens", "8", "Tell me a story.").strip()


@case
def prompt_without_stream(target: Target) -> None:
    assert llm(target, "-m", "served", "--no-stream", "-o", "max_tokens", "8", "Tell me a story.").strip()


@case
def system_prompt(target: Target) -> None:
    assert llm(target, "-m", "served", "-s", "Be brief.", "-o", "max_tokens", "8", "Tell me a story.").strip()


@case
def seed_and_temperature(target: Target) -> None:
    options = ("-o", "max_tokens", "8", "-o", "seed", "3", "-o", "temperature", "1")
    first, second = (llm(target, "-m", "served", *options, "Tell me a story.") for _ in range(2))
    assert first == second != ""


@case
def schema(target: Target) -> None:
    llm(target, "-m", "served", "--schema", "name, age int", "Tell me a story.")


@case
def tools(target: Target) -> None:
    llm(target, "-m", "served", "-T", "llm_version", "Tell me a story.")


if __name__ == "__main__":
    run()
