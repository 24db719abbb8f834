"""Whether somebody wrote an option, which its value does not tell where it has a default."""

import typer


def is_given(command: typer.Context, name: str) -> bool:
    """Whether the option `name` is on the command line."""
    source = command.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
