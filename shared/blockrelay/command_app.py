"""Runs a command-line app and turns its errors into one line on stderr and an exit code."""

import sys

import typer
from typer.exceptions import TyperException

from blockrelay.errors import BlockrelayError
from blockrelay.exit_codes import FAILED, UNUSABLE, complain, exit_code
from blockrelay.typed_command import typed


def run_app(app: typer.Typer, arguments: list[str] | None = None, *, name: str) -> int:
    """Runs `app` and returns the exit code: 0, 2 if the user must change something, 1 for any other failure.

    It is 130 after Ctrl-C, and what the command returns if that is an integer. Errors are one line on stderr.
    `arguments` are those of the process if None; `name` is the command as users type it. Exceptions that are bugs are
    not caught.
    """
    try:
        code = app(arguments, prog_name=name, standalone_mode=False)  # --help and Ctrl-C come back as a code
    except TyperException as error:  # an option that does not exist, a value of the wrong type
        message = error.format_message()
        if not message or "\n" in message:  # the whole help: a group of commands was called without a command
            typer.echo(message)  # as --help does
            return 0
        help_command = typed(f"{name.partition(' ')[2] or 'COMMAND'} --help")
        complain(f"{message.rstrip('.')} (see {help_command})")
        return error.exit_code
    except ValueError as error:
        if (problems := _wrong_settings(error)) is None:
            raise
        complain(problems)
        return UNUSABLE
    except BlockrelayError as error:
        complain(error)
        return exit_code(error, otherwise=FAILED)
    except OSError as error:
        complain(error)
        return FAILED
    except (typer.Abort, KeyboardInterrupt):
        return 130  # as shells report Ctrl-C
    return code if isinstance(code, int) else 0


def _wrong_settings(error: ValueError) -> str | None:
    """Returns what is wrong with settings in the environment; None if `error` is about something else.

    It does not import pydantic: commands without settings do not need it.
    """
    if "pydantic" not in sys.modules:
        return None
    from pydantic import ValidationError

    from blockrelay.settings import problems_of

    return problems_of(error) if isinstance(error, ValidationError) else None
