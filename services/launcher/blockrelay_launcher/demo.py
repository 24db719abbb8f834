"""`blockrelay demo`: everything is started, one answer streams to the terminal, a table says what it took."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.block_folder.manifest import CHAT_TEMPLATE_NAME, TOKENIZER_NAME, Manifest
from blockrelay.errors import ServiceUnavailable, UsageError
from blockrelay_launcher.background import running_up

QUESTION, OPENING = "Tell me a story.", "Once upon a time"
MAX_TOKENS, SEED, TEMPERATURE = 320, 13, 0.7


@dataclass(slots=True)
class Measured:
    """Times are of the monotonic clock, in seconds; counts as the gateway reports them."""

    asked: float
    first: float | None = None
    last: float | None = None
    prompt_tokens: int = 0
    tokens: int = 0
    reason: str = ""
    fingerprint: str = ""
    fallbacks: int = 0


def run_demo(model: Path, *, stages: int, prompt: str | None) -> int:
    """The exit code. Leaves nothing running. Raises UsageError for a model that cannot tell anything."""
    manifest = open_block_folder(model, blocks=[]).manifest
    if TOKENIZER_NAME not in manifest.files:
        raise UsageError(f"{model} has no {TOKENIZER_NAME}: the demo needs a model that reads and writes text")
    if stages > manifest.model.blocks:
        raise UsageError(f"--stages is {stages}, but the model has {manifest.model.blocks} blocks")
    path, body = _request(manifest, prompt)
    asked_at = time.monotonic()
    with running_up(model, stages) as url:
        ready_s = time.monotonic() - asked_at
        measured = Measured(time.monotonic())
        for text in _stream(f"{url}{path}", body, measured):
            sys.stdout.write(text)
            sys.stdout.flush()
        sys.stdout.write("\n\n")
        sys.stdout.flush()
    Console().print(_table(manifest, stages, ready_s, measured))
    return 0


def _request(manifest: Manifest, prompt: str | None) -> tuple[str, dict[str, Any]]:
    common = {
        "model": manifest.model.name, "max_tokens": min(MAX_TOKENS, manifest.model.max_position // 2), "seed": SEED,
        "temperature": TEMPERATURE, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    if prompt is None and CHAT_TEMPLATE_NAME in manifest.files:
        sys.stdout.write(f"> {QUESTION}\n\n")
        return "/v1/chat/completions", {**common, "messages": [{"role": "user", "content": QUESTION}]}
    sys.stdout.write(prompt or OPENING)
    return "/v1/completions", {**common, "prompt": prompt or OPENING}


def _stream(url: str, body: dict[str, Any], measured: Measured) -> Iterator[str]:
    """The pieces of the answer as they come; fills `measured`."""
    with httpx.stream("POST", url, json=body, timeout=httpx.Timeout(10, read=120)) as answer:
        if not answer.is_success:
            answer.read()
            raise ServiceUnavailable(f"the gateway answered {answer.status_code}: {answer.text[:300]}")
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise ServiceUnavailable(f"the answer ended with an error: {chunk['error']}")
            if text := _take(chunk, measured):
                measured.last = time.monotonic()
                measured.first = measured.first or measured.last
                yield text


def _take(chunk: dict[str, Any], measured: Measured) -> str:
    """The text in a chunk of either format; notes everything else."""
    measured.fingerprint = chunk.get("system_fingerprint") or measured.fingerprint
    measured.fallbacks = len(chunk.get("fallback_events") or []) or measured.fallbacks
    if usage := chunk.get("usage"):
        measured.prompt_tokens, measured.tokens = usage["prompt_tokens"], usage["completion_tokens"]
    for choice in chunk["choices"]:
        measured.reason = choice.get("finish_reason") or measured.reason
        return str(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return ""


def _table(manifest: Manifest, stages: int, ready_s: float, measured: Measured) -> Table:
    table = Table(show_header=False, title="what it took")
    model = manifest.model
    rows = {
        "model": f"{model.name} ({model.family}, {model.layers} layers, hidden {model.hidden_size})",
        "precision": f"{manifest.precision}{', exact' if manifest.exact else ''}",
        "stages": f"{stages} ({model.blocks} blocks), one worker each",
        "time until ready": f"{ready_s:.1f} s",
        "prompt tokens": str(measured.prompt_tokens),
        "tokens": f"{measured.tokens} (finish reason: {measured.reason})",
    }
    if measured.first is not None and measured.last is not None:
        rows["time to first token"] = f"{1000 * (measured.first - measured.asked):.0f} ms"
        if measured.last > measured.first:
            rows["tokens per second"] = f"{(measured.tokens - 1) / (measured.last - measured.first):.0f}"
    rows["fallbacks"] = str(measured.fallbacks)
    rows["numerics id"] = measured.fingerprint
    for name, value in rows.items():
        table.add_row(name, value)
    return table
