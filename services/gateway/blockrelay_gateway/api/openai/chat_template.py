"""Chat messages to prompt text, by the model's own Jinja template, as transformers renders it."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError

from blockrelay.errors import BadRequest
from blockrelay.text.template_environment import compiled, template_environment

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

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        keyed: bool = False,
        answers: bool = True,
        variables: Mapping[str, Any] = _NONE,
    ) -> str:
        """The prompt that asks the assistant for the next message, or if not `answers` ends behind the last one.
        `variables` are the client's. Raises BadRequest when the template refuses, and for variables that are ours.

        `keyed`: the prompt must be the same on every day, so a template that asks for the date is told `KEYED_DAY`.
        """
        ours = {
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": answers,
            **({"strftime_now": KEYED_DAY.strftime} if keyed else {}),
            **self._special,
        }
        if taken := sorted((ours.keys() | _RESERVED) & variables.keys()):
            name = "chat_template_kwargs"
            raise BadRequest(f"{name}: {taken[0]} is not for clients to set", param=f"{name}.{taken[0]}")
        try:
            return self._template.render({**variables, **ours})
        except TemplateError as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}", param="messages") from error
        except RecursionError as error:
            raise BadRequest("the model's chat template calls itself without end", param="messages") from error
        except Exception as error:  # a template is a program of its author's, and ends with any error of Python
            said = f"the model's chat template fails on these messages: {type(error).__name__}: {error}"
            raise BadRequest(said, param="messages") from error
