"""Runs commands that other services implement, by replacing this process: services do not import each other.

The module imports nothing of the launcher, so that these commands start fast.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from blockrelay.extras import Extra, need

#: For each command, the module to run in place of this process, and the extra that installs it.
OTHER_SERVICES: Mapping[str, tuple[str, Extra]] = {
    "generate": ("blockrelay_worker.offline.generate", "worker"),
    "evaluate": ("blockrelay_worker.offline.evaluate", "worker"),
    "convert": ("blockrelay_converter", "converter"),
    "devices": ("blockrelay_worker.offline.devices", "worker"),
    "gpu-report": ("blockrelay_worker.offline.gpu_report", "worker"),
    "plan": ("blockrelay_scheduler.plan_command", "scheduler"),
    "precision": ("blockrelay_scheduler.plan_command.precision", "scheduler"),
    "analyse": ("blockrelay_converter.analyse", "worker"),
}


def become(command: str, arguments: Sequence[str] | None) -> NoReturn:
    """Runs a command of OTHER_SERVICES in place of this process. Raises UsageError if its extra is not installed."""
    module, extra = OTHER_SERVICES[command]
    need(extra)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *(arguments or [])])


def become_at_once(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Runs the command `arguments[0]` in place of this process if it is in OTHER_SERVICES, else returns.

    Call it before the imports of the launcher, which take a second. With settings (BLOCKRELAY_...) in `environment` it
    returns too, so that their names are checked first. Raises UsageError if the command's extra is not installed.
    """
    if (
        arguments
        and arguments[0] in OTHER_SERVICES
        and not any(name.upper().startswith("BLOCKRELAY_") for name in environment)
    ):
        become(arguments[0], arguments[1:])
