"""Chat templates render as transformers renders them, in a sandbox."""

import pytest

from blockrelay.errors import BadRequest, BlockFolderError
from blockrelay_gateway.api.openai.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]


def render(source: str) -> str:
    return ChatTemplate(source, special_tokens={"bos_token": "<s>", "pad_token": "<pad>"}).render(MESSAGES)


def test_a_template_sees_messages_special_tokens_and_the_generation_prompt() -> None:
    text = render(
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}{% if tools %}no{% endif %}"
    )
    assert text == "<s>[user]hi[assistant]"


def test_blocks_leave_no_empty_lines() -> None:
    assert render("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}\n") == "x\n"


def test_a_template_may_refuse_with_its_own_words() -> None:
    with pytest.raises(BadRequest, match="roles must alternate") as refused:
        render("{{ raise_exception('roles must alternate') }}")
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", '{"b": "<é>", "a": [1]}'),
        ("(ensure_ascii=False)", '{"b": "<é>", "a": [1]}'),
        ("(ensure_ascii=True)", '{"b": "<\\u00e9>", "a": [1]}'),
        ("(separators=(',', ':'))", '{"b":"<é>","a":[1]}'),
        ("(sort_keys=True)", '{"a": [1], "b": "<é>"}'),
        ("(indent=1)", '{\n "b": "<é>",\n "a": [\n  1\n ]\n}'),
    ],
)
def test_json_is_written_as_transformers_writes_it(options: str, expected: str) -> None:
    assert render("{{ {'b': '<é>', 'a': [1]} | tojson" + options + " }}") == expected


def test_what_a_template_marks_as_generated_is_text_like_any_other() -> None:
    source = (
        "{% for m in messages %}{% generation %}{% set x = 1 %}{{ m.content }}{% endgeneration %}{{ x }}{% endfor %}"
    )
    assert render(source) == "hi"


def test_special_tokens_are_defined_where_the_tokenizer_has_them() -> None:
    assert render("{{ pad_token + bos_token }}{{ eos_token is defined }}") == "<pad><s>False"


def test_a_namespace_takes_no_hidden_names() -> None:
    assert render("{% set n = namespace(self=1, a=2) %}{% set n.a = 3 %}{{ n.a }}{{ dict(b=1).b }}") == "31"
    with pytest.raises(BadRequest, match="underscore"):
        render("{% set n = namespace(__class__=1) %}")


def test_loops_may_be_left_and_the_date_is_known() -> None:
    assert render("{% for m in [1, 2] %}{{ m }}{% break %}{% endfor %}") == "1"
    assert render("{{ strftime_now('%Y') }}").isdecimal()


def test_a_keyed_request_has_the_same_prompt_on_every_day() -> None:
    source = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}"
    template = ChatTemplate(source)
    assert template.render(MESSAGES, keyed=True) == "26 Jul 2024" != template.render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ messages[5].content.nothing }}",
        "{{ 1 // 0 }}",
        "{{ range(10 ** 9) | list }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ '{5}'.format(1) }}",
        "{{ 'a' * 10 ** 18 }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox_and_its_mistakes_are_bad_requests(source: str) -> None:
    with pytest.raises(BadRequest):
        render(source)


def test_what_is_no_template_is_found_when_the_folder_is_opened() -> None:
    with pytest.raises(BlockFolderError, match="line 2"):
        ChatTemplate("x\n{% for %}")
