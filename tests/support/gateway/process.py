"""A gateway as a process of its own."""

import subprocess
import sys

from blockrelay.settings import environment_for


def launch(settings: dict[str, str]) -> "subprocess.Popen[str]":
    """A gateway process with these settings, whose log comes by `stderr` and which any warning of Python ends."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "blockrelay_gateway"],
        env=environment_for(**settings),
        stderr=subprocess.PIPE,
        text=True,
    )
