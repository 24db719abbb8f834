"""Commands that become another process: services do not import each other. Nothing of the launcher is loaded here."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from blockrelay.extras import Extra, need

#: Command -> the module that it becomes, and the extra that has its parts.
PASSED_ON: Mapping[str, tuple[str, Extra]] = {
    "generate": ("blockrelay_worker.offline.generate", "worker"),
    "evaluate": ("blockrelay_worker.offline.evaluate", "worker"),
    "convert": ("blockrelay_converter", "converter"),
    "devices": ("blockrelay_worker.offline.devices", "worker"),
    "gpu-report": ("blockrelay_worker.offline.gpu_report", "worker"),
    "plan": ("blockrelay_scheduler.plan_command", "scheduler"),
    "analyse": ("blockrelay_converter.analyse", "worker"),
}


def become(command: str, arguments: Sequence[str] | None) -> NoReturn:
    """Run a command of PASSED_ON in place of this process. Raises UsageError where its parts are not installed."""
    module, extra = PASSED_ON[command]
    need(extra)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *(arguments or [])])


def become_at_once(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """The same for what stands on the command line, before everything else is loaded, which takes a second. Not where
    there are settings in the environment: their names are looked at first."""
    if (
        arguments
        and arguments[0] in PASSED_ON
        and not any(name.upper().startswith("BLOCKRELAY_") for name in environment)
    ):
        become(arguments[0], arguments[1:])
