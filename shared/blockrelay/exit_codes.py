"""How services end, for whoever starts them again."""

import os
import sys
import threading

#: With these settings, this model or these Redis servers no start will ever succeed.
UNUSABLE = 2
#: A failure that another start may not meet.
BROKEN = 70


def end_with_any_thread() -> None:
    """From now on an exception that ends a thread ends the process, with BROKEN: a service without one of its threads
    must not look alive."""
    threading.excepthook = _end


def _end(failure: threading.ExceptHookArgs) -> None:
    sys.__excepthook__(failure.exc_type, failure.exc_value or failure.exc_type(), failure.exc_traceback)
    os._exit(BROKEN)
