"""Runs `blockrelay demo`: starts a system, streams one answer to the terminal and prints a table of its times."""

import contextlib
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.block_folder.manifest import CHAT_TEMPLATE_NAME, TOKENIZER_NAME, Manifest
from blockrelay.errors import ServiceUnavailable, UsageError
from blockrelay_launcher.background import running_up
from blockrelay_launcher.client.resuming import Refused
from blockrelay_launcher.demo.answer import Answer, http_client, request_body, streamed, write
from blockrelay_launcher.demo.batch import run_batch
from blockrelay_launcher.demo.batch_file import read_batch
from blockrelay_launcher.demo.interactive import run_interactive
from blockrelay_launcher.demo.options import DemoOptions
from blockrelay_launcher.tables import facts_table

#: Without --prompt: the question to a model that chats, and the text that any other model continues.
QUESTION, OPENING = "Tell me a story.", "Once upon a time"
#: Default for the most prompts of a batch at once.
CONCURRENCY = 8


def run_demo(options: DemoOptions) -> int:
    """Runs the demo, ends all processes, and returns the exit code: 1 if a prompt of a batch failed, else 0.

    Raises UsageError or BlockFolderError, before it starts anything, for options or a block folder that cannot work.
    Raises ServiceUnavailable if the system does not start or a single answer does not come.
    """
    manifest = open_block_folder(options.model, blocks=[]).manifest
    if TOKENIZER_NAME not in manifest.files:
        raise UsageError(f"{options.model} has no {TOKENIZER_NAME}: the demo needs a model that reads and writes text")
    if options.stages > manifest.model.blocks:
        raise UsageError(f"--stages is {options.stages}, but the model has {manifest.model.blocks} blocks")
    chats = CHAT_TEMPLATE_NAME in manifest.files
    if options.interactive:
        if not chats:
            raise UsageError(f"{options.model} has no {CHAT_TEMPLATE_NAME}: --interactive needs a model that chats")
        return run_interactive(options.model, manifest, stages=options.stages)
    if options.batch is not None:
        prompts = read_batch(options.batch, chats=chats)
        concurrency = options.concurrency or CONCURRENCY
        return run_batch(
            options.model, manifest, prompts, stages=options.stages, concurrency=concurrency, as_json=options.as_json
        )
    return _one_answer(options.model, manifest, stages=options.stages, prompt=options.prompt)


def _one_answer(model: Path, manifest: Manifest, *, stages: int, prompt: str | None) -> int:
    body = _opening(manifest, prompt)
    asked_at = time.monotonic()
    with running_up(model, stages) as url, http_client() as http:
        ready_s = time.monotonic() - asked_at
        answer = Answer(time.monotonic())
        try:
            with contextlib.closing(streamed(http, url, body, answer)) as pieces:
                for piece in pieces:
                    write(piece)
        except Refused as refused:
            raise ServiceUnavailable(f"the gateway answered {str(refused)[:300]}") from refused
        write("\n\n")
    Console().print(facts_table("what it took", _rows(manifest, stages, ready_s, answer)))
    return 0


def _opening(manifest: Manifest, prompt: str | None) -> dict[str, Any]:
    """Returns the body of the single request, and prints its prompt."""
    if prompt is None and CHAT_TEMPLATE_NAME in manifest.files:
        write(f"> {QUESTION}\n\n")
        return request_body(manifest, {"messages": [{"role": "user", "content": QUESTION}]})
    write(prompt or OPENING)
    return request_body(manifest, {"prompt": prompt or OPENING})


def _rows(manifest: Manifest, stages: int, ready_s: float, answer: Answer) -> dict[str, str]:
    model = manifest.model
    rows = {
        "model": f"{model.name} ({model.family}, {model.layers} layers, hidden {model.hidden_size})",
        "precision": f"{manifest.precision}{', exact' if manifest.exact else ''}",
        "stages": f"{stages} ({model.blocks} blocks), one worker each",
        "time until ready": f"{ready_s:.1f} s",
        "prompt tokens": str(answer.prompt_tokens),
        "tokens": f"{answer.tokens} (finish reason: {answer.reason})",
    }
    if answer.first is not None and answer.last is not None:
        rows["time to first token"] = f"{1000 * answer.first:.0f} ms"
        if answer.last > answer.first:
            rows["tokens per second"] = f"{(answer.tokens - 1) / (answer.last - answer.first):.0f}"
    rows["fallbacks"] = str(answer.fallbacks)
    rows["numerics id"] = answer.fingerprint
    return rows
