"""Reads the file of `blockrelay demo --batch FILE`: one prompt per line, as text or as JSON objects."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import BadRequest, UsageError
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.text.text_file import read_text_file

ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the file: `fields` has "prompt" or "messages", and the sampling fields of the line."""

    fields: Mapping[str, Any]

    @property
    def asked(self) -> dict[str, Any]:
        """The prompt or the messages alone, under the name of their field."""
        return {name: self.fields[name] for name in ("prompt", "messages") if name in self.fields}

    @property
    def words(self) -> str:
        """The prompt, or the last message, on one line."""
        text: Any = self.fields["prompt"] if "prompt" in self.fields else self.fields["messages"][-1]["content"]
        if isinstance(text, list):
            text = " ".join(str(part["text"]) for part in text if isinstance(part, dict) and "text" in part)
        return " ".join(str(text).split())


def read_batch(path: Path, *, chats: bool) -> list[Prompt]:
    """Returns the prompts of a file, in its order. `chats`: the model takes messages.

    Every line of a file `*.jsonl` must be JSON; any other file is read as `parse_batch` decides. Raises UsageError for
    a file that is missing, empty or not UTF-8, for a wrong line, which it names, and for messages without `chats`.
    """
    prompts = list(parse_batch(read_text_file(path), str(path), json_lines=path.suffix == ".jsonl"))
    if not prompts:
        raise UsageError(f"{path}: holds no prompt")
    for prompt in prompts:
        if "messages" in prompt.fields and not chats:
            raise UsageError(f"{path}: has messages, but the model has no chat template: send it prompts")
    return prompts


def parse_batch(content: str, name: str, *, json_lines: bool = False) -> Iterator[Prompt]:
    """Yields the prompts in `content`. All lines are JSON if `json_lines`, or if the first filled line begins with {.

    Raises UsageError that names `name` and the number of the line.
    """
    lines = [line.removesuffix("\r") for line in content.removeprefix("\ufeff").split("\n")]
    filled = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    json_lines = json_lines or (bool(filled) and filled[0][1].lstrip().startswith("{"))
    for number, line in filled:
        yield _parse_object(line, f"{name}: line {number}") if json_lines else Prompt({"prompt": line})


def _parse_object(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as problem:
        raise UsageError(f"{where}: not a JSON object: {problem.msg} at character {problem.colno}") from None
    except UnicodeEncodeError:
        raise UsageError(f"{where}: holds half of a surrogate pair, which is not a character") from None
    except (ValueError, RecursionError) as problem:
        raise UsageError(f"{where}: not a JSON object: {problem}") from None
    read = Fields(value, where, UsageError)
    fields: dict[str, Any] = {}
    if read.has("prompt") == read.has("messages"):
        read.fail("needs either prompt or messages")
    if read.has("prompt"):
        fields["prompt"] = read.text("prompt")
        if not fields["prompt"]:
            read.fail("prompt is empty")
    else:
        fields["messages"] = _messages(read)
    if read.has("max_tokens"):
        fields["max_tokens"] = read.integer("max_tokens", minimum=1)
    if read.has("temperature"):
        fields["temperature"] = read.number("temperature")
    if read.has("seed"):
        fields["seed"] = read.take("seed")
    for left in read.names():
        if read.has(left):
            read.fail(f"unknown field {left!r}")
    try:
        SamplingParams(**{field: value for field, value in fields.items() if field not in ("prompt", "messages")})
    except BadRequest as problem:
        read.fail(str(problem))
    return Prompt(fields)


def _messages(read: Fields) -> list[dict[str, Any]]:
    """Returns the messages unchanged after a check of roles and contents; the gateway checks the rest."""
    messages: object = read.take("messages")
    if not isinstance(messages, list) or not messages:
        read.fail("messages must be a list of messages")
    for number, message in enumerate(cast(list[object], messages)):
        one = read.inner(f"messages[{number}]", message)
        one.text("role", one_of=ROLES)
        if not isinstance(one.take("content"), str | list):
            one.fail("content must be a string or a list of parts")
    return cast(list[dict[str, Any]], messages)
