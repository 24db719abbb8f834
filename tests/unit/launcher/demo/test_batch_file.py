"""Files of prompts: text or JSON lines, and every mistake is one line that names where it is."""

from pathlib import Path
from typing import Any

import pytest

from blockrelay.errors import UsageError
from blockrelay_launcher.demo.batch_file import Prompt, parse_batch, read_batch

CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]


def parsed(content: str, *, json_lines: bool = False) -> list[dict[str, Any]]:
    return [dict(prompt.fields) for prompt in parse_batch(content, "F", json_lines=json_lines)]


def test_every_line_of_text_that_is_not_empty_is_a_prompt_as_it_is() -> None:
    content = "\ufeffOnce upon\n\n  \t\n  two spaces \r\n{no JSON, and \u2028 ends no line}"
    assert parsed(content) == [
        {"prompt": "Once upon"},
        {"prompt": "  two spaces "},
        {"prompt": "{no JSON, and \u2028 ends no line}"},
    ]


def test_json_lines_name_a_prompt_or_messages_and_how_to_sample() -> None:
    content = (
        '\n{"prompt": "a\\nb", "max_tokens": 5, "temperature": 0, "seed": -1, "messages": null}\r\n\n'
        '{"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]}\n'
    )
    assert parsed(content) == [
        {"prompt": "a\nb", "max_tokens": 5, "temperature": 0.0, "seed": -1},
        {"messages": CHAT},
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hello", ["not a JSON object", "character 1"]),
        ('{"prompt": "a"', ["not a JSON object"]),
        ("[1]", ["expected an object"]),
        ('"text"', ["expected an object"]),
        ("[" * 100_000, ["not a JSON object"]),
        ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", ["not a JSON object"]),
        ('{"prompt": 1}', ["prompt must be a string"]),
        ('{"prompt": ""}', ["prompt is empty"]),
        ('{"prompt": "\\ud800"}', ["surrogate"]),
        ("{}", ["either prompt or messages"]),
        ('{"prompt": "a", "messages": [{}]}', ["either prompt or messages"]),
        ('{"messages": "a"}', ["messages must be a list"]),
        ('{"messages": []}', ["messages must be a list"]),
        ('{"messages": ["a"]}', ["messages[0]", "expected an object"]),
        ('{"messages": [{"role": "king", "content": "a"}]}', ["messages[0]", "role", "'king'"]),
        ('{"messages": [{"role": "user", "content": 5}]}', ["messages[0]", "content"]),
        ('{"prompt": "a", "max_token": 5}', ["unknown field 'max_token'"]),
        ('{"prompt": "a", "max_tokens": 0}', ["max_tokens", "at least 1"]),
        ('{"prompt": "a", "max_tokens": true}', ["max_tokens", "at least 1"]),
        ('{"prompt": "a", "temperature": 2.5}', ["temperature", "0 and 2"]),
        ('{"prompt": "a", "temperature": NaN}', ["temperature", "finite"]),
        ('{"prompt": "a", "seed": 1.5}', ["seed", "whole number"]),
    ],
)
def test_a_wrong_line_is_named(line: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        parsed(f'{{"prompt": "fine"}}\n\n{line}\n')
    said = str(error.value)
    assert said.startswith("F: line 3: ") and "\n" not in said and all(word in said for word in words), said


def test_a_file_called_jsonl_holds_json_from_its_first_line_on(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("Once upon a time\n")
    with pytest.raises(UsageError, match="line 1: not a JSON object"):
        read_batch(file, chats=True)


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot be read"), (b"", "is empty"), (b" \n\n", "holds no prompt"), (b"a\xff", "is not UTF-8")],
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "prompts"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=f"^{file}: {said}"):
        read_batch(file, chats=True)


def test_messages_need_a_model_that_chats(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('{"messages": [{"role": "user", "content": "Hello"}]}')
    assert len(read_batch(file, chats=True)) == 1
    with pytest.raises(UsageError, match="no chat template"):
        read_batch(file, chats=False)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": " a\n b "}, "a b"),
        ({"messages": CHAT}, "Hello"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "He"}, {"text": "llo"}, 5]}]}, "He llo"),
    ],
)
def test_the_words_of_a_prompt_are_one_line(fields: dict[str, Any], words: str) -> None:
    assert Prompt(fields).words == words
    assert Prompt({**fields, "seed": 1}).asked == fields
