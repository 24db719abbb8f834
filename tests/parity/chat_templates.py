"""Renders real chat templates by Blockrelay and by transformers, and compares: `python -m tests.parity.chat_templates`.

It takes an archive that holds templates as `.../models/templates/*.jinja`, as the source distribution of
llama-cpp-python does. Needs transformers and jinja2; `make parity-templates` fetches all of it. Each template gets the
conversations below; both must render the same, or both refuse. Tools, calls and their results are compared where the
template shows tools in a form that we know. Two things are ours, and asked of transformers in our
way: a developer's message is the system's where the template knows no developers, and parts of text are joined where
the template does not walk through parts.
"""

import re
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from blockrelay.errors import BadRequest
from blockrelay_gateway.api.openai.chat_template import ChatTemplate
from blockrelay_gateway.api.openai.tools.formats import shown_form

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
AT_LEAST = 60
"""Fewer templates mean that the archive is another one than it was."""

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages, and what the model is to do: answer, go on within the last one, or neither; it may call `tools`."""

    messages: tuple[Message, ...]
    answers: bool = True
    continues: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def speaks_of_tools(self) -> bool:
        return bool(self.tools) or any(message["role"] == "tool" for message in self.messages)


def _text(role: str, text: str, **more: Any) -> Message:
    return {"role": role, "content": text, **more}


def _parts(role: str, *texts: str) -> Message:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "find", "arguments": {"é": [1]}}}
_SCHEMA = {"type": "object", "properties": {"é": {"type": "array", "items": {"type": "integer"}}}, "required": ["é"]}
_TOOLS = (
    {"type": "function", "function": {"name": "find", "description": 'Find "é" <here>.', "parameters": _SCHEMA}},
    {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {"type": "object"}}},
)
_CALLED = (
    _text("user", "Hi."),
    _text("assistant", "", tool_calls=[_CALL]),
    _text("tool", "42", tool_call_id="abcdefghi", name="find"),
)
CONVERSATIONS = {
    "user": Conversation((_text("user", "Hi."),)),
    "system": Conversation((_text("system", "Be brief."), _text("user", "Hi."))),
    "system in the middle": Conversation(
        (_text("user", "Hi."), _text("assistant", "Yes?"), _text("system", "Be brief."), _text("user", "So?"))
    ),
    "developer": Conversation((_text("developer", "Be brief."), _text("user", "Hi."))),
    "several assistants": Conversation(
        (_text("user", "Hi."), _text("assistant", "Yes?"), _text("assistant", "Well?"), _text("user", "So?"))
    ),
    "tools": Conversation((_text("user", "Hi."),), tools=_TOOLS),
    "tools and system": Conversation((_text("system", "Be brief."), _text("user", "Hi.")), tools=_TOOLS),
    "a result": Conversation(_CALLED, tools=_TOOLS),
    "a result, and more": Conversation((*_CALLED, _text("assistant", "So!"), _text("user", "So?")), tools=_TOOLS),
    "a result without tools": Conversation((*_CALLED, _text("user", "So?"))),
    "parts": Conversation(
        (
            _parts("system", "Be brief."),
            _parts("user", "Hi ", "there."),
            _parts("assistant", "Yes?"),
            _parts("user", "So?"),
        )
    ),
    "empty content": Conversation((_text("user", "Hi."), _text("assistant", ""), _text("user", ""))),
    "no answer": Conversation((_text("user", "Hi."), _text("assistant", "Yes?")), answers=False),
    "prefill": Conversation((_text("user", "Hi."), _text("assistant", "<e ")), answers=False, continues=True),
    "empty prefill": Conversation((_text("user", "Hi."), _text("assistant", "")), answers=False, continues=True),
    "prefill in parts": Conversation(
        (_parts("user", "Hi."), _parts("assistant", "Yes", "?")), answers=False, continues=True
    ),
}


def ours(source: str, conversation: Conversation) -> str | None:
    """The prompt as Blockrelay renders it, None where it refuses."""
    template = ChatTemplate(source, special_tokens=SPECIAL_TOKENS)
    try:
        return template.render(
            conversation.messages,
            answers=conversation.answers,
            continues=conversation.continues,
            tools=conversation.tools,
        )
    except BadRequest:
        return None


def theirs(source: str, conversation: Conversation) -> str | None:
    """The prompt as transformers renders it, asked in the form that the template shows; None where it refuses."""
    renamed = "'system'" in source.replace('"', "'") and "'developer'" not in source.replace('"', "'")
    messages = [
        {**message, "role": "system"} if renamed and message["role"] == "developer" else message
        for message in conversation.messages
    ]
    said = [part["text"] for message in messages if isinstance(message["content"], list) for part in message["content"]]
    for joined in ((), ("system",), ("system", "user", "assistant")):
        asked = [_joined(message) if message["role"] in joined else message for message in messages]
        found = _transformers(source, asked, conversation)
        if not said or (found is not None and _keeps(found, said)):
            return found
    return None


def _keeps(rendered: str, said: Sequence[str]) -> bool:
    """All texts are there, and not as a list that was printed."""
    return all(text.strip() in rendered for text in said) and not re.search(r"text\\?['\"]\s*:", rendered)


def _joined(message: Mapping[str, Any]) -> Message:
    content = message["content"]
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": "".join(part["text"] for part in cast(list[dict[str, str]], content))}


def _transformers(source: str, messages: list[Message], conversation: Conversation) -> str | None:
    from transformers.utils.chat_template_utils import (  # pyright: ignore[reportMissingImports]  (only `make parity` installs it)
        render_jinja_template,  # pyright: ignore[reportUnknownVariableType]
    )

    try:
        rendered, _ = render_jinja_template(
            [messages],
            tools=list(conversation.tools) or None,
            chat_template=source,
            add_generation_prompt=conversation.answers,
            continue_final_message=conversation.continues,
            **SPECIAL_TOKENS,
        )
    except Exception:  # noqa: BLE001 - templates fail with whatever Python raises, and all of it is a refusal
        return None
    return str(rendered[0])


def templates(archive: Path) -> Iterator[tuple[str, str]]:
    """Name and source of each template in the archive."""
    with tarfile.open(archive) as files:
        for member in files:
            if "/models/templates/" in member.name and member.name.endswith(".jinja"):
                content = files.extractfile(member)
                assert content is not None
                yield Path(member.name).stem, content.read().decode()


def main() -> None:
    archive = Path(sys.argv[1])
    counted: Counter[str] = Counter()
    found = 0
    for name, source in templates(archive):
        found += 1
        shows_tools = shown_form(source) is not None
        counted["templates that show tools"] += shows_tools
        for kind, conversation in CONVERSATIONS.items():
            if conversation.speaks_of_tools and not shows_tools:  # they reach it as texts of ours
                continue
            mine, others = ours(source, conversation), theirs(source, conversation)
            # Some templates tell the time; a second may pass between the two.
            same = mine == others or (
                mine and others and re.sub(r"\d\d:\d\d", "", mine) == re.sub(r"\d\d:\d\d", "", others)
            )
            counted["refused by both" if same and mine is None else "equal" if same else "different"] += 1
            if not same:
                print(f"{name}, {kind}:\n  ours         {mine!r}\n  transformers {others!r}")
    print(f"{found} templates: {', '.join(f'{count} {what}' for what, count in sorted(counted.items()))}")
    if found < AT_LEAST or counted["different"]:
        sys.exit(f"{counted['different']} differences; {found} templates, at least {AT_LEAST} are expected")


if __name__ == "__main__":
    main()
