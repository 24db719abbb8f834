"""Groups of command-line options: a command takes dataclasses, and each field of them is an option."""

import inspect
from collections.abc import Callable, Set
from copy import copy
from dataclasses import MISSING, Field, fields
from inspect import Parameter
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

import typer
from typer.models import ParameterInfo


def option(metavar: str, text: str, **more: Any) -> Any:
    """Returns the declaration of an option with a value; `text` is its help, `more` further arguments of Typer's."""
    return typer.Option(metavar=metavar, help=text, **more)


def flag(name: str, text: str) -> Any:
    """Returns the declaration of an option that is True where it is given."""
    return typer.Option(name, help=text)


def switch(text: str) -> Any:
    """Returns the declaration of a pair of options, `--NAME` and `--no-NAME`."""
    return typer.Option(help=text)


class OptionGroup:
    """Base of a group: a frozen dataclass whose fields are annotated with `typer.Option` or `typer.Argument`.

    A field without such an annotation is no option and keeps its default. The default of a field is that of its option;
    a field without one, or with a `default_factory`, must be given. A group may inherit from another one.
    """

    __slots__ = ()
    TITLE: ClassVar[str | None] = None
    """The title of the options that this class adds, in the help; None: they have none of their own."""

    def check(self, given: Set[str]) -> None:
        """Raises UsageError for options that do not go together. Subclasses override it; here nothing is checked.

        `given` has the names of all parameters of the command, of other groups too, that are on its command line.
        """


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Returns `command` for Typer: each parameter whose type is an OptionGroup becomes the options of its fields.

    The groups are made and checked before `command` runs. Parameters of other types stay as they are.
    """
    own = list(inspect.signature(command, eval_str=True).parameters.values())
    groups: dict[str, type[Any]] = {
        one.name: one.annotation
        for one in own
        if isinstance(one.annotation, type) and issubclass(one.annotation, OptionGroup)
    }
    options = {name: _options(group) for name, group in groups.items()}

    def run(command_context: typer.Context, **values: Any) -> None:
        given = {name for name in values if _is_given(command_context, name)}
        for name, group in groups.items():
            made = group(**{option.name: values.pop(option.name) for option in options[name]})
            made.check(given)
            values[name] = made
        command(**values)

    parameters = [Parameter("command_context", Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for one in own:
        parameters += options.get(one.name, [one.replace(kind=Parameter.KEYWORD_ONLY)])
    run.__dict__["__signature__"] = inspect.Signature(parameters)
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _options(group: type[Any]) -> list[Parameter]:
    """Returns a parameter for each field of a group that is an option."""
    hints = get_type_hints(group, include_extras=True)
    return [_option(group, field, hints[field.name]) for field in fields(group) if _declares(hints[field.name])]


def _declares(hint: Any) -> bool:
    return get_origin(hint) is Annotated and isinstance(get_args(hint)[1], ParameterInfo)


def _option(group: type[Any], field: Field[Any], hint: Any) -> Parameter:
    kind, info = get_args(hint)
    info = copy(info)
    info.rich_help_panel = next(one.TITLE for one in group.__mro__ if field.name in inspect.get_annotations(one))
    default = Parameter.empty if field.default is MISSING else field.default
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def _is_given(context: typer.Context, name: str) -> bool:
    """True if the option `name` (a parameter of the command) is on the command line, even with its default value."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
