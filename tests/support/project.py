"""Where the project lies."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Runs Python and the worker on an emulated ARM CPU, whose name is the first argument; `.ci/arm build/arm` makes it.
ARM_PYTHON = ROOT / "build/arm/python"
