"""How commands end: those that run in one process (`generate`, `convert`, `analyse` and the like), and `blockrelay`."""

import sys

import typer
from typer.exceptions import TyperException

from blockrelay.errors import BlockrelayError
from blockrelay.exit_codes import FAILED, UNUSABLE, complain, exit_code
from blockrelay.typed_command import typed


def run_app(app: typer.Typer, arguments: list[str] | None = None, *, name: str) -> int:
    """The exit code: 0, 2 for something the caller must change, 1 for a failure of ours or of the machine.

    Errors are one line on stderr. `name` is what people call the command.
    """
    try:
        code = app(arguments, prog_name=name, standalone_mode=False)  # --help and Ctrl-C come back as a code
    except TyperException as error:  # an option that does not exist, a value of the wrong type
        said = error.format_message()
        if not said or "\n" in said:  # the whole help, of a command of several without one of them
            typer.echo(said)  # as --help does
            return 0
        helps = typed(f"{name.partition(' ')[2] or 'COMMAND'} --help")
        complain(f"{said.rstrip('.')} (see {helps})")
        return error.exit_code
    except ValueError as error:
        if (said := _wrong_settings(error)) is None:
            raise
        complain(said)
        return UNUSABLE
    except BlockrelayError as error:
        complain(error)
        return exit_code(error, otherwise=FAILED)
    except OSError as error:
        complain(error)
        return FAILED
    except (typer.Abort, KeyboardInterrupt):
        return 130  # what a shell reports for Ctrl-C
    return code if isinstance(code, int) else 0


def _wrong_settings(error: ValueError) -> str | None:
    """What is wrong with settings in the environment, if that is the error. Commands without any load no pydantic."""
    if "pydantic" not in sys.modules:
        return None
    from pydantic import ValidationError

    from blockrelay.settings import problems_of

    return problems_of(error) if isinstance(error, ValidationError) else None
