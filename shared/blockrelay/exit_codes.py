"""Exit codes of commands and services, for scripts and for supervisors that restart services."""

import os
import sys
import threading

from blockrelay.errors import BlockFolderError, BlockrelayError, RequestError, UsageError

#: Beginning of each error line of commands and services.
PREFIX = "blockrelay: "
#: A command failed.
FAILED = 1
#: No start with these settings, this model or these Redis servers can succeed.
UNUSABLE = 2
#: A service failed, and may succeed when it is started again.
BROKEN = 70


def complain(error: object) -> None:
    """Writes `error` as one line to stderr."""
    sys.stderr.write(f"{PREFIX}{error}\n")


def exit_code(error: BlockrelayError, *, otherwise: int = BROKEN) -> int:
    """Returns the exit code of a process that ends with `error`.

    It is UNUSABLE if only another command line, setting, request or folder helps, else `otherwise`: BROKEN for a
    service, FAILED for a command.
    """
    return UNUSABLE if isinstance(error, UsageError | RequestError | BlockFolderError) else otherwise


def end_with_any_thread() -> None:
    """Makes an exception that ends any thread end the process with BROKEN.

    A service that has lost one of its threads must not look alive.
    """
    threading.excepthook = _end


def _end(failure: threading.ExceptHookArgs) -> None:
    sys.__excepthook__(failure.exc_type, failure.exc_value or failure.exc_type(), failure.exc_traceback)
    os._exit(BROKEN)
