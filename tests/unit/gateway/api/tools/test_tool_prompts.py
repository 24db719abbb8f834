"""Tools, calls and results in the prompts of chat templates: small ones in the manners of real ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from blockrelay_gateway.api.openai.chat_template import ChatTemplate
from blockrelay_gateway.api.openai.tools.formats import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, CallForm
from blockrelay_gateway.api.openai.tools.prompts import with_names

TEMPLATES = Path(__file__).with_name("templates")
QWEN, LLAMA_3, MISTRAL_V3 = ((TEMPLATES / f"{name}.jinja").read_text() for name in ("qwen", "llama", "mistral"))
MISTRAL_NEW = MISTRAL_V3.replace("[TOOL_CALLS] [", "[TOOL_CALLS]x[ARGS]")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
XML = QWEN.replace("</tools>", "</tools><function=name>")
ANOTHER = "{% if tools %}{{ tools | tojson }}<|tool|>{% endif %}" + CHATML

PARAMETERS = {"type": "object", "properties": {"stadt": {"type": "string", "description": "größer"}}}
TOOL = {"type": "function", "function": {"name": "wetter", "description": "für eine Stadt", "parameters": PARAMETERS}}
AS_JSON = json.dumps(TOOL, ensure_ascii=False)
CALL = {"id": "call_1", "type": "function", "function": {"name": "wetter", "arguments": {"stadt": "Köln"}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sonnig", "tool_call_id": "call_1"},
]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (QWEN, HERMES), (LLAMA_3, LLAMA), (MISTRAL_V3, MISTRAL), (MISTRAL_NEW, MISTRAL_ARGS),
        (CHATML, HERMES), (XML, HERMES), (ANOTHER, HERMES),
    ],
)  # fmt: skip
def test_the_form_of_calls_is_that_of_the_template(template: str, form: CallForm) -> None:
    assert ChatTemplate(template).call_form is form


def render(template: str, messages: list[dict[str, Any]] = MESSAGES, *, answers: bool = True) -> str:
    return ChatTemplate(template).render(messages, tools=[TOOL], answers=answers)


def test_qwen() -> None:
    assert render(QWEN) == (
        f"<|im_start|>system\n# Tools\n<tools>\n{AS_JSON}\n</tools>\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nHi<|im_end|>\n"
        f"<|im_start|>assistant\n{CALLED}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsonnig\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_llama() -> None:
    assert render(LLAMA_3) == (
        '[user]Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
        "\n"
        f"{json.dumps(TOOL, ensure_ascii=False, indent=4)}Hi"
        '[assistant]{"name": "wetter", "parameters": {"stadt": "Köln"}}[ipython]"sonnig"'
    )


def test_mistral_gets_ids_that_it_takes() -> None:
    prompt = render(MISTRAL_V3)
    name = prompt.partition('"id": "')[2][:9]
    assert name.isalnum() and prompt == (
        f"[AVAILABLE_TOOLS] [{AS_JSON}][/AVAILABLE_TOOLS][INST] Hi[/INST]"
        f'[TOOL_CALLS] [{{"name": "wetter", "arguments": {{"stadt": "Köln"}}, "id": "{name}"}}]</s>'
        f"[TOOL_RESULTS] {name} sonnig"
    )
    own = [MESSAGES[0], {**MESSAGES[1], "tool_calls": [{**CALL, "id": "abcdefgh9"}]}]
    assert '"id": "abcdefgh9"' in render(MISTRAL_V3, own), "an id that fits stays"


DESCRIBED = f"""\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{AS_JSON}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
CALLED = '<tool_call>\n{"name": "wetter", "arguments": {"stadt": "Köln"}}\n</tool_call>'


@pytest.mark.parametrize("template", [CHATML, ANOTHER])
def test_a_template_without_a_form_that_we_know_gets_texts(template: str) -> None:
    assert render(template) == (
        f"<|im_start|>system\n{DESCRIBED}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        f"<|im_start|>assistant\n{CALLED}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsonnig\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_are_described_behind_what_the_system_says() -> None:
    said = {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]}
    prompt = render(CHATML, [said, MESSAGES[0]], answers=False)
    assert prompt == f"<|im_start|>system\nBe brief.\n\n{DESCRIBED}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


def test_results_of_one_message_are_one_message() -> None:
    both = {**MESSAGES[1], "content": "Two calls.", "tool_calls": [CALL, CALL]}
    prompt = render(NO_SYSTEM, [MESSAGES[0], both, MESSAGES[2], MESSAGES[2]], answers=False)
    result = "<tool_response>\nsonnig\n</tool_response>"
    assert prompt == f"[user]{DESCRIBED}\n\nHi[assistant]Two calls.\n{CALLED}\n{CALLED}[user]{result}\n{result}"


@pytest.mark.parametrize(("template", "several"), [(QWEN, True), (LLAMA_3, False), (MISTRAL_V3, True), (CHATML, True)])
def test_a_message_has_as_many_calls_as_the_template_takes(template: str, several: bool) -> None:
    assert ChatTemplate(template).takes_several_calls is several


def test_results_have_the_name_of_the_function() -> None:
    other = {**MESSAGES[2], "tool_call_id": "call_2"}
    own = {**MESSAGES[2], "name": "mine"}
    named = with_names([*MESSAGES, other, own])
    assert named == [*MESSAGES[:2], {**MESSAGES[2], "name": "wetter"}, other, own]


def test_without_tools_templates_see_none() -> None:
    assert ChatTemplate(QWEN).render(MESSAGES[:1]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert "# Tools" not in ChatTemplate(CHATML).render(MESSAGES)
