"""Chat messages to prompt text, by the model's own Jinja template, as transformers renders it."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

from jinja2 import TemplateError

from blockrelay.errors import BadRequest
from blockrelay.text.template_environment import compiled, template_environment

#: The day that templates of Llama 3 name where there is no clock.
KEYED_DAY = datetime(2024, 7, 26, tzinfo=UTC)
_NONE: Mapping[str, Any] = {}


class ChatTemplate:
    """A compiled template. Immutable."""

    def __init__(self, source: str, *, bos_token: str | None, eos_token: str | None) -> None:
        """Raises BlockFolderError if `source` is not Jinja."""
        environment = template_environment()
        environment.filters["tojson"] = _to_json
        functions: dict[str, Any] = {"raise_exception": _raise_exception}
        environment.globals.update(functions)
        self._template = compiled(environment, source)
        self._special = {"bos_token": bos_token or "", "eos_token": eos_token or ""}

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
            "strftime_now": KEYED_DAY.strftime if keyed else _strftime_now,
            **self._special,
        }
        if taken := sorted(ours.keys() & variables.keys()):
            name = "chat_template_kwargs"
            raise BadRequest(f"{name}: {taken[0]} is not for clients to set", param=f"{name}.{taken[0]}")
        try:
            return self._template.render({**variables, **ours})
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}", param="messages") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    """As transformers has it: Jinja's own filter would escape for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
