"""The options of `blockrelay demo`. The module imports little, because the command line needs it for its help."""

import sys
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from blockrelay.errors import UsageError
from blockrelay_launcher.option_groups import flag, option
from blockrelay_launcher.up_options.groups import ModelOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions(ModelOptions):
    """The options of `blockrelay demo`. `interactive` or `batch` takes the place of a single answer."""

    TITLE: ClassVar = None
    stages: Annotated[int, option("N", "Number of equal stages that the model is cut into.", min=1)] = 3
    prompt: Annotated[str | None, option("TEXT", "Text that the answer continues.")] = None
    interactive: Annotated[bool, flag("--interactive", "Chat instead: every line of stdin is a turn.")] = False
    batch: Annotated[
        Path | None, option("FILE", "Answer all prompts of this file, one per line: texts or JSON objects.")
    ] = None
    concurrency: Annotated[
        int | None, option("N", "With --batch: most prompts at once; default: 8.", min=1, max=1024)
    ] = None
    as_json: Annotated[
        bool, flag("--json", "With --batch: print a JSON object per prompt and one with the figures.")
    ] = False

    def check(self, given: Set[str]) -> None:
        """Raises UsageError for options that do not go together."""
        if self.interactive and self.batch is not None:
            raise UsageError("--interactive and --batch: choose one of them")
        if self.interactive and not sys.stdin:
            raise UsageError("--interactive reads stdin, which is closed")
        if self.prompt is not None and (self.interactive or self.batch is not None):
            raise UsageError("--prompt is for one answer: leave it out with --interactive and --batch")
        for name, asked in (("--json", self.as_json), ("--concurrency", self.concurrency is not None)):
            if asked and self.batch is None:
                raise UsageError(f"{name} needs --batch")
