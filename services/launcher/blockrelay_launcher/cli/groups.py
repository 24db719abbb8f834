"""The groups of commands in `blockrelay --help`, with one line for each command."""

from typing import Any

from typer.core import TyperGroup

GROUPS: dict[str, dict[str, str]] = {
    "First steps": {
        "demo": "Start a system, stream one answer, end it.",
        "up": "Start a system on this machine: Redis, workers, gateway.",
        "status": "Show the plan, the workers and the queue.",
        "devices": "Show this machine's devices and what one lacks.",
    },
    "Models": {
        "convert": "Make a block folder of a Hugging Face checkpoint.",
        "analyse": "Show what a model costs; a load needs: --sizing.",
        "generate": "Generate text in one process, without services.",
        "evaluate": "Measure how well a model predicts a text.",
        "check": "Try ONNX blocks that you own.",
        "split": "Make ONNX blocks of a whole decoder.",
        "import": "Make a block folder of ONNX blocks.",
    },
    "Operate": {
        "plan": "Choose which device runs which blocks; apply it.",
        "precision": "Show or change the precision while requests run.",
        "cancel": "Cancel a request.",
        "keys": "Make, list and remove API keys.",
        "dead-letters": "Show, replay and remove requests that failed.",
        "cells": "Check a file of cells; show what each does.",
    },
    "Measure": {
        "bench": "Measure the speed through the gateway.",
        "profile": "Measure what each block takes, for plans.",
        "drill": "Hurt a loaded system and compare every answer.",
        "gpu-report": "Print facts about GPUs, to send to us.",
    },
}


class Grouped(TyperGroup):
    """The root command; its help shows the commands in the groups of `GROUPS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names of all commands, in the order of the groups."""
        there = [name for names in GROUPS.values() for name in names]
        return sorted(super().list_commands(ctx), key=lambda name: there.index(name) if name in there else len(there))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns a command with its group and its line of help, or None for an unknown name."""
        command: Any = super().get_command(ctx, cmd_name)
        for group, names in GROUPS.items():
            if command is not None and cmd_name in names:
                command.rich_help_panel, command.short_help = group, names[cmd_name]
        return command
