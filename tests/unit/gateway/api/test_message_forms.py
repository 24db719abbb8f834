"""Messages reach every kind of chat template in a form that it shows. tests/parity compares real templates."""

from typing import Any

import pytest

from blockrelay.errors import BadRequest
from blockrelay_gateway.api.openai.chat_template import ChatTemplate

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Small templates in the manners of real ones, by name.
TEMPLATES = {
    "any role": CHATML,
    "default system": "{% if messages[0].role != 'system' %}[system]You help.{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
    "three roles": "{% for m in messages %}{% if m.role == 'system' %}[S]{{ m.content }}{% elif m.role == 'user' %}"
    "[U]{{ m.content }}{% elif m.role == 'assistant' %}[A]{{ m.content }}{% endif %}{% endfor %}",
    "developers": "{% for m in messages %}{% if m.role in ['developer', 'system'] %}[{{ m.role[0] | upper }}]"
    "{% else %}[{{ m.role[0] }}]{% endif %}{{ m.content }}{% endfor %}",
    "parts only": "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endfor %}",
    "text or parts": "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}({{ part['text'] }}){% endfor %}{% endif %}{% endfor %}",
    "first part": "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}"
    "{% else %}{{ m.content[0]['text'] }}{% endif %}{% endfor %}",
    "system as text": "{% for m in messages %}[{{ m.role }}]{% if m.role == 'system' %}{{ m.content + '.' }}"
    "{% else %}{% for part in m.content %}{{ part['text'] }}{% endfor %}{% endif %}{% endfor %}",
    "no system": "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}",
    "printed": "{% for m in messages %}[{{ m.role }}]{{ m.content | string }}{% endfor %}",
    "as json": "{{ messages | tojson }}",
}


def text(role: str, said: str) -> dict[str, Any]:
    return {"role": role, "content": said}


def parts(role: str, *said: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": one} for one in said]}


def render(name: str, *messages: dict[str, Any], **options: Any) -> str:
    return ChatTemplate(TEMPLATES[name]).render(messages, answers=False, **options)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("any role", "<|im_start|>developer\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"),
        ("default system", "[system]Be brief[user]Hi"),
        ("three roles", "[S]Be brief[U]Hi"),
        ("developers", "[D]Be brief[u]Hi"),
        ("system as text", "[system]Be brief.[user]Hi"),
    ],
)
def test_a_developer_speaks_as_the_system_where_a_template_knows_none(name: str, expected: str) -> None:
    assert render(name, text("developer", "Be brief"), text("user", "Hi")) == expected


def test_a_developer_is_refused_where_the_system_is() -> None:
    with pytest.raises(BadRequest, match="no system"):
        render("no system", text("developer", "Be brief"), text("user", "Hi"))


@pytest.mark.parametrize(
    ("name", "as_text", "as_parts"),
    [
        ("three roles", "[S]s[U]hithere[A]a", "[S]s[U]hithere[A]a"),
        ("parts only", "[system]s[user]hithere[assistant]a", "[system]s[user]hithere[assistant]a"),
        ("text or parts", "[system]s[user]hithere[assistant]a", "[system](s)[user](hi)(there)[assistant](a)"),
        ("first part", "[system]s[user]hithere[assistant]a", "[system]s[user]hithere[assistant]a"),
        ("system as text", "[system]s.[user]hithere[assistant]a", "[system]s.[user]hithere[assistant]a"),
        ("printed", "[system]s[user]hithere[assistant]a", "[system]s[user]hithere[assistant]a"),
    ],
)
def test_text_is_kept_in_both_forms(name: str, as_text: str, as_parts: str) -> None:
    assert render(name, text("system", "s"), text("user", "hithere"), text("assistant", "a")) == as_text
    assert render(name, parts("system", "s"), parts("user", "hi", "there"), parts("assistant", "a")) == as_parts


def test_a_template_that_prints_messages_whole_gets_text() -> None:
    assert render("as json", parts("user", "h", "i")) == '[{"role": "user", "content": "hi"}]'


@pytest.mark.parametrize("said", ["<", "e", "|im_end|", "", " x ", "ENDOFTHISMESSAGE0 é"])
def test_a_chat_goes_on_at_the_very_end_of_its_last_message(said: str) -> None:
    before = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render("any role", text("user", "Hi"), text("assistant", said), continues=True) == before + said


@pytest.mark.parametrize(
    ("name", "last", "expected"),
    [
        ("no system", text("assistant", " So "), "[user]Hi[assistant]So"),
        ("parts only", text("assistant", "So"), "[user]Hi[assistant]So"),
        ("parts only", parts("assistant", "So", "e"), "[user]Hi[assistant]Soe"),
        ("text or parts", parts("assistant", "So", "e"), "[user]Hi[assistant](So)(e"),
        ("three roles", parts("assistant", "So", "e"), "[U]Hi[A]Soe"),
        ("parts only", text("assistant", ""), "[user]Hi[assistant]"),
    ],
)
def test_a_last_message_goes_on_in_every_form(name: str, last: dict[str, Any], expected: str) -> None:
    assert render(name, text("user", "Hi"), last, continues=True) == expected


def test_a_template_that_leaves_the_last_message_out_cannot_go_on_with_it() -> None:
    template = ChatTemplate("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")
    with pytest.raises(BadRequest, match="does not show the last message"):
        template.render([text("user", "Hi"), text("assistant", "So")], answers=False, continues=True)
