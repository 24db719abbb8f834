"""The forms in which models write tool calls, and the one that a chat template shows.

A form is data: the texts around the name and the arguments of a call. A grammar is made of it, so an answer has exactly
these texts, and the answer is cut by them again.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from blockrelay.text.template_environment import variables

#: Texts that some tokenizers have as one special token; `grammar` spells them as such where they are.
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
_BESIDE_JSON = " or json"
_NAME = r"[a-zA-Z0-9_-]{1,64}"


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """How one family of models writes tool calls."""

    name: str
    """The form's name, which records of requests have."""
    trigger: str
    """Text, or special token, behind which calls follow."""
    leading: bool = False
    """Calls stand at the very beginning of an answer."""
    braced: bool = False
    """An opening brace at the very beginning shows calls too."""
    opening: str = ""
    """What stands between `trigger` and the first call, in Lark's notation."""
    before_name: str = '{"name": "'
    before_arguments: str = '", "arguments": '
    after_arguments: str = "}"
    separator: str
    """Text between two calls."""
    closing: str = ""
    """Text behind the last call."""

    @cached_property
    def head(self) -> re.Pattern[str]:
        """Matches what a call has before its arguments; the first group is the function's name."""
        return re.compile(f"{re.escape(self.before_name)}({_NAME}){re.escape(self.before_arguments)}")

    def beside_json(self) -> "CallForm":
        """Returns this form for answers that are calls or JSON: its name is this one's and _BESIDE_JSON.

        The trigger may stand within a text of the JSON, so it counts at the very beginning only.
        """
        return replace(self, name=self.name + _BESIDE_JSON, leading=True)

    @property
    def marks(self) -> tuple[str, ...]:
        """The entries of MARKS that calls of this form contain."""
        parts = self.trigger + self.before_name + self.before_arguments + self.after_arguments + self.separator
        return tuple(mark for mark in MARKS if mark in parts)


#: Qwen 2.5 and 3, Hermes, and every model whose template shows no tools: these are described to it in this form.
HERMES = CallForm(
    name="hermes",
    trigger="<tool_call>",
    before_name='\n{"name": "',
    after_arguments="}\n</tool_call>",
    separator="\n<tool_call>",
)
#: Llama 3.1 to 3.3.
LLAMA = CallForm(
    name="llama",
    trigger="<|python_tag|>",
    leading=True,
    braced=True,
    before_arguments='", "parameters": ',
    separator="; ",
)
#: Mistral's models up to 2024: a list of calls.
MISTRAL = CallForm(name="mistral", trigger="[TOOL_CALLS]", opening='" "? "["', separator=", ", closing="]")
#: Mistral's models from 2025 on.
MISTRAL_ARGS = CallForm(
    name="mistral_args",
    trigger="[TOOL_CALLS]",
    before_name="",
    before_arguments="[ARGS]",
    after_arguments="",
    separator="[TOOL_CALLS]",
)
FORMS: Mapping[str, CallForm] = {form.name: form for form in (HERMES, LLAMA, MISTRAL, MISTRAL_ARGS)}


def form_named(name: str) -> CallForm | None:
    """Returns the form with this name, which a record has; None for any other name, such as ""."""
    form = FORMS.get(name.removesuffix(_BESIDE_JSON))
    return form.beside_json() if form is not None and name.endswith(_BESIDE_JSON) else form


#: What the templates of Llama 3 say about a call. Those of other models that write `"parameters"` say it otherwise.
_LLAMA = re.compile(r'\{\\?"name\\?": ?function name, ?\\?"parameters\\?":')


def shown_form(template: str) -> CallForm | None:
    """Returns the form of calls that the chat `template` shows the model; None if it shows no tools, or another form.

    Raises jinja2's TemplateSyntaxError if it is not Jinja.
    """
    if "tools" not in variables(template):
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template and '"arguments' in template.replace("\\", ""):
        # Other families have XML within the same tags.
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    return LLAMA if _LLAMA.search(template) else None
