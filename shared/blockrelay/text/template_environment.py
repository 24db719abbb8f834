"""The Jinja environment for models' chat templates, set up as in transformers. Needs `jinja2`.

A template comes with a model and is not trusted: it runs in Jinja's immutable sandbox.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import CallBlock, Const, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from blockrelay.errors import BlockFolderError


def template_environment() -> ImmutableSandboxedEnvironment:
    """Returns a sandboxed environment with all tags, filters and functions that transformers gives a chat template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Any] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    environment.globals.update(functions)
    return environment


def compiled(environment: ImmutableSandboxedEnvironment, source: str, *, name: str = "the chat template") -> Template:
    """Compiles the template `source`.

    Raises BlockFolderError, which calls the template `name`, if it is not Jinja or nested too deeply for it.
    """
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise BlockFolderError(f"{name} is not Jinja: line {error.lineno}: {error.message}") from error
    except (RecursionError, SyntaxError) as error:  # Jinja compiles to Python, whose compiler limits nesting
        raise BlockFolderError(f"{name} is nested too deeply for Jinja") from error


def constants(source: str) -> frozenset[str]:
    """Returns all string literals in the expressions of a template, such as the roles that it knows.

    Raises jinja2's TemplateSyntaxError if it is not Jinja.
    """
    parsed = template_environment().parse(source)
    values = [constant.value for constant in parsed.find_all(Const)]
    return frozenset(value for value in values if isinstance(value, str))


def variables(source: str) -> frozenset[str]:
    """Returns the names that a template takes from its caller, such as `tools`.

    Raises jinja2's TemplateSyntaxError if it is not Jinja.
    """
    return frozenset(find_undeclared_variables(template_environment().parse(source)))


class _Generation(Extension):
    """The tag `{% generation %}...{% endgeneration %}` around the assistant's text; it renders what it encloses."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, not the bare body: a variable that is `set` within it stays within it, as in transformers.
        return CallBlock(self.call_method("_enclosed"), [], [], body).set_lineno(line)

    def _enclosed(self, caller: Macro) -> str:
        return caller()


class _Dict:
    """The function `dict` of templates, without the methods of Python's type."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Python's `dict.fromkeys`."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """The `namespace` of templates. Raises SecurityError for names that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *others = args  # `self` is not named, so that a template may have a field of that name
        fields: Mapping[str, Any] = dict(*others, **values)
        for name in fields:
            _check_name(name)
        Namespace.__init__(self, fields)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template cannot store {name!r} in a namespace: names begin without an underscore")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encodes JSON as transformers does. Jinja's own filter would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
