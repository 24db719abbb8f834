"""A gateway as a process of its own."""

import subprocess
import sys

from blockrelay.settings import environment_for


def launch(settings: dict[str, str]) -> "subprocess.Popen[str]":
    """With these settings; its log comes by `stderr`, and a warning of Python ends it."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "blockrelay_gateway"],
        env=environment_for(**settings),
        stderr=subprocess.PIPE,
        text=True,
    )
