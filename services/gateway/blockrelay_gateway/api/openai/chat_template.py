"""Chat messages to prompt text, by the model's own Jinja template, as transformers renders it."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError

from blockrelay.errors import BadRequest
from blockrelay.text.template_environment import compiled, constants, template_environment
from blockrelay_gateway.api.openai.message_forms import MessageForms, continued, text_of

#: The day that templates of Llama 3 name where there is no clock.
KEYED_DAY = datetime(2024, 7, 26)
#: Names that a client cannot set even where the model does not.
_RESERVED = frozenset(("bos_token", "eos_token", "raise_exception", "strftime_now"))
_NONE: Mapping[str, Any] = {}


class ChatTemplate:
    """A compiled template. Immutable."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] = _NONE) -> None:
        """`special_tokens`: how the model's tokenizer spells them, by the names that templates have for them, such as
        `bos_token`; a name that is not there is not defined in the template either.

        Raises BlockFolderError if `source` is not Jinja.
        """
        self._template = compiled(template_environment(), source)
        self._special = dict(special_tokens)
        self._forms = MessageForms.of(lambda messages: self._fill(messages, {}), constants(source))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        keyed: bool = False,
        answers: bool = True,
        continues: bool = False,
        variables: Mapping[str, Any] = _NONE,
    ) -> str:
        """The prompt that asks the assistant for the next message, or if not `answers` ends behind the last one, or if
        it `continues` within the last one, at its end.

        Content is text or a list of parts of type text, whichever the template is written for, and a developer's
        message one of the system where the template knows no developers. `variables` are the client's. Raises
        BadRequest when the template refuses, and for variables that are ours.

        `keyed`: the prompt must be the same on every day, so a template that asks for the date is told `KEYED_DAY`.
        """
        given = dict(variables)
        if taken := sorted((self._special.keys() | _OURS | _RESERVED) & given.keys()):
            name = "chat_template_kwargs"
            raise BadRequest(f"{name}: {taken[0]} is not for clients to set", param=f"{name}.{taken[0]}")
        if keyed:
            given["strftime_now"] = KEYED_DAY.strftime
        shaped = [self._forms.shaped(message) for message in messages]
        if not continues:
            return self._fill(shaped, given, answers=answers)
        mark = _mark(messages)
        text = self._fill([*shaped[:-1], continued(shaped[-1], mark)], given, answers=answers)
        return _up_to(text, mark, text_of(shaped[-1]))

    def _fill(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, answers: bool = True
    ) -> str:
        ours = {
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": answers,
        }
        try:
            return self._template.render({**variables, **self._special, **ours})
        except TemplateError as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}", param="messages") from error
        except RecursionError as error:
            raise BadRequest("the model's chat template calls itself without end", param="messages") from error
        except Exception as error:  # a template is a program of its author's, and ends with any error of Python
            said = f"the model's chat template fails on these messages: {type(error).__name__}: {error}"
            raise BadRequest(said, param="messages") from error


_OURS = frozenset(("messages", "tools", "documents", "add_generation_prompt"))


def _mark(messages: Sequence[Mapping[str, Any]]) -> str:
    """A word that no message holds; the space behind it shows whether the template keeps spaces at the end."""
    said, count = str(messages), 0
    while f"ENDOFTHISMESSAGE{count}" in said:
        count += 1
    return f"ENDOFTHISMESSAGE{count} "


def _up_to(text: str, mark: str, message: str) -> str:
    """The rendered `text` up to `mark`, which stands behind what the last message says: the model goes on there."""
    place = text.rfind(mark.strip())
    if place < 0 or message.strip() not in text:
        raise BadRequest("the model's chat template does not show the last message as it is", param="messages")
    return text[:place] if text[place:].startswith(mark) else text[:place].rstrip()
