"""Renders chat messages as prompt text with the model's own Jinja template, like Hugging Face's transformers."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError

from blockrelay.errors import BadRequest
from blockrelay.text.template_environment import compiled, constants, template_environment
from blockrelay_gateway.api.openai import reasoning
from blockrelay_gateway.api.openai.message_forms import MessageForms, continued, text_of
from blockrelay_gateway.api.openai.tools.formats import HERMES, shown_form
from blockrelay_gateway.api.openai.tools.prompts import as_texts, with_fitting_ids

#: The date that keyed requests get, so that they have one prompt on every day: Llama 3's default without a clock.
KEYED_DAY = datetime(2024, 7, 26)
#: Variables that a client cannot set even if the model does not define them.
_RESERVED = frozenset(("bos_token", "eos_token", "raise_exception", "strftime_now"))
_NONE: Mapping[str, Any] = {}


class ChatTemplate:
    """A compiled chat template. Immutable."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] = _NONE) -> None:
        """Compiles `source`. Raises BlockFolderError if it is not Jinja or nested too deeply.

        `special_tokens` has the text of the model's special tokens by their names in templates, such as `bos_token`;
        other names stay undefined in the template.
        """
        self.source = source
        self._template = compiled(template_environment(), source)
        self._special = dict(special_tokens)
        self._forms = MessageForms.of(lambda messages: self._fill(messages, {}), constants(source))
        shown = shown_form(source)
        self._shows_tools = shown is not None
        #: The form in which answers call tools.
        self.call_form = shown or HERMES
        #: Whether the model reasons before it answers.
        self.reasons = reasoning.is_shown(source)
        #: Whether a message may have several calls: Llama 3's templates refuse that, and so would the next request.
        self.takes_several_calls = self._takes_calls(2) or not self._takes_calls(1)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        keyed: bool = False,
        answers: bool = True,
        continues: bool = False,
        variables: Mapping[str, Any] = _NONE,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Renders `messages` as the prompt of the assistant's next message.

        Each message has a `role` and a `content`: a text, or a list of parts `{"type": "text", "text": ...}`. Without
        `answers` (`add_generation_prompt`), the prompt ends behind the last message. If it `continues`, it ends within
        the last message, which must exist, so that the model goes on there. The content is converted to the form that
        the template shows, and the role `developer` to `system` for a template that names only the latter. `variables`
        are the client's, by their names in the template. A `keyed` request must have the same prompt on every day, so
        its date is KEYED_DAY. The model may call `tools`; a template that shows none gets them as text.

        Raises BadRequest if the template refuses the messages or fails, for variables that are not the client's, and if
        it `continues` a message that the template does not show unchanged.
        """
        given = dict(variables)
        if taken := sorted((self._special.keys() | _OURS | _RESERVED) & given.keys()):
            name = "chat_template_kwargs"
            raise BadRequest(f"{name}: {taken[0]} is not for clients to set", param=f"{name}.{taken[0]}")
        if keyed:
            given["strftime_now"] = KEYED_DAY.strftime
        if self._shows_tools:
            messages = with_fitting_ids(messages, self.call_form)
        else:
            messages, tools = as_texts(messages, tools, has_system="system" in self._forms.shown), ()
        shaped = [self._forms.shaped(message) for message in messages]
        if not continues:
            return self._fill(shaped, given, answers=answers, tools=tools)
        mark = _mark(messages)
        text = self._fill([*shaped[:-1], continued(shaped[-1], mark)], given, answers=answers, tools=tools)
        return _up_to(text, mark, text_of(shaped[-1]))

    def _takes_calls(self, count: int) -> bool:
        """Returns whether the template shows a message with `count` calls, and their results."""
        names = [f"call{index:05}" for index in range(count)]
        function = {"name": "f", "arguments": {}}
        calls = [{"id": name, "type": "function", "function": function} for name in names]
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": calls},
            *({"role": "tool", "content": "b", "tool_call_id": name, "name": "f"} for name in names),
        ]
        try:
            self.render(messages)
        except BadRequest:
            return False
        return True

    def _fill(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        answers: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        ours = {
            "messages": [dict(message) for message in messages],
            "tools": [dict(tool) for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": answers,
        }
        try:
            return self._template.render({**variables, **self._special, **ours})
        except TemplateError as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}", param="messages") from error
        except RecursionError as error:
            raise BadRequest("the model's chat template calls itself without end", param="messages") from error
        except Exception as error:  # a template is its author's program: it may raise any error of Python
            message = f"the model's chat template fails on these messages: {type(error).__name__}: {error}"
            raise BadRequest(message, param="messages") from error


_OURS = frozenset(("messages", "tools", "documents", "add_generation_prompt"))


def _mark(messages: Sequence[Mapping[str, Any]]) -> str:
    """A word that no message holds; the space behind it shows if the template keeps spaces at the end."""
    text, count = str(messages), 0
    while f"ENDOFTHISMESSAGE{count}" in text:
        count += 1
    return f"ENDOFTHISMESSAGE{count} "


def _up_to(text: str, mark: str, message: str) -> str:
    """The rendered `text` up to `mark`, which stands behind the last message's text: the model goes on there.

    Raises BadRequest if the template does not show the last message unchanged.
    """
    place = text.rfind(mark.strip())
    if place < 0 or message.strip() not in text:
        raise BadRequest("the model's chat template does not show the last message as it is", param="messages")
    return text[:place] if text[place:].startswith(mark) else text[:place].rstrip()
