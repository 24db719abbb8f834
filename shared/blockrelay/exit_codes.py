"""How commands and services end, for scripts and for whatever starts services again."""

import os
import sys
import threading

from blockrelay.errors import BlockFolderError, BlockrelayError, RequestError, UsageError

#: Before every error, of commands and of services.
PREFIX = "blockrelay: "
#: A command could not do what it was asked for.
FAILED = 1
#: With these settings, this model or these Redis servers no start will ever succeed.
UNUSABLE = 2
#: A failure that another start may not meet.
BROKEN = 70


def complain(error: object) -> None:
    """One line on stderr."""
    sys.stderr.write(f"{PREFIX}{error}\n")


def exit_code(error: BlockrelayError, *, otherwise: int = BROKEN) -> int:
    """What a process ends with for an error that it raised on purpose: UNUSABLE where only another command line,
    setting, request or folder helps, else `otherwise` (a service: BROKEN; a command: FAILED)."""
    return UNUSABLE if isinstance(error, UsageError | RequestError | BlockFolderError) else otherwise


def end_with_any_thread() -> None:
    """From now on an exception that ends a thread ends the process, with BROKEN: a service without one of its threads
    must not look alive."""
    threading.excepthook = _end


def _end(failure: threading.ExceptHookArgs) -> None:
    sys.__excepthook__(failure.exc_type, failure.exc_value or failure.exc_type(), failure.exc_traceback)
    os._exit(BROKEN)
