"""Tells an option on the command line from one that has its default value."""

import typer


def is_given(command: typer.Context, name: str) -> bool:
    """True if the option `name` (a parameter of the command) is on the command line."""
    source = command.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
