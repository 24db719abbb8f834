"""How the commands end that run in one process: `generate`, `evaluate`, `convert`, `analyse` and the like."""

import typer
from typer.exceptions import TyperException

from blockrelay.errors import BlockrelayError
from blockrelay.exit_codes import FAILED, exit_code


def run_app(app: typer.Typer, arguments: list[str] | None = None, *, name: str | None = None) -> int:
    """The exit code: 0, 2 for something the caller must change, 1 for a failure of ours or of the machine.

    Errors are one line on stderr. `name` is what people call the command, where that is not how Python runs it.
    """
    try:
        code = app(arguments, prog_name=name, standalone_mode=False)  # --help and Ctrl-C come back as a code
    except TyperException as error:  # an option that does not exist, a value of the wrong type
        typer.echo(f"error: {error.format_message()}", err=True)
        return 2
    except BlockrelayError as error:
        typer.echo(f"error: {error}", err=True)
        return exit_code(error, otherwise=FAILED)
    except OSError as error:
        typer.echo(f"error: {error}", err=True)
        return FAILED
    except (typer.Abort, KeyboardInterrupt):
        return 130  # what a shell reports for Ctrl-C
    return code if isinstance(code, int) else 0
