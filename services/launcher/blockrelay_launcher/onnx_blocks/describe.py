"""`blockrelay up --blocks`: has the worker describe ONNX blocks that are to be served as they are."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import typer

from blockrelay.errors import UsageError
from blockrelay.onnx_blocks.report import decode_described
from blockrelay_launcher.onnx_blocks.worker import code_of_silence, worker

_MODULE = "blockrelay_worker.offline.onnx_blocks.describe"
StandIn = Literal["imported", "files"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksOptions:
    """The options of `up` about ONNX blocks; None and False: not given."""

    folder: Path | None
    max_position: int | None
    stand_in: StandIn | None
    sequential: bool
    max_warm_sessions: int | None
    memory: int | None

    def check(self, *, gpus: bool) -> None:
        """Raises UsageError for options without what they are of."""
        for option, value in (("--max-warm-sessions", self.max_warm_sessions), ("--memory", self.memory)):
            if value is not None and not self.sequential:
                raise UsageError(f"{option} is for --sequential")
        if self.stand_in is not None and (self.folder is None or not gpus or self.sequential):
            raise UsageError("--stand-in is for --blocks with --gpu, and not for --sequential")
        if self.folder is None and self.sequential:
            raise UsageError("--sequential is for --blocks: other models are cut into stages")
        if self.folder is None and self.max_position is not None:
            raise UsageError("--max-position is for --blocks: converting a model decides about its context")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedBlocks:
    """What services serve blocks from: the folder that describes them; the worker's settings of blocks that are run one
    by one; the block folder that CPU workers compute with, None: the files themselves."""

    model: Path
    warm: Mapping[str, object] = field(default_factory=dict[str, object])
    imported: Path | None = None


def served_blocks(options: BlocksOptions, *, gpus: bool) -> ServedBlocks | None:
    """Described, and imported for CPUs where GPUs run them. None where no blocks are asked for. stderr has a line for
    what no file says, and for what stands in.

    Raises UsageError for options that do not go together, and typer.Exit where the worker has said what is wrong.
    """
    options.check(gpus=gpus)
    if options.folder is None:
        return None
    model = _described(options.folder, options.max_position)
    imported: Path | None = None
    if gpus and not options.sequential and options.stand_in != "files":
        # Only here: it needs what reads tokenizers, which the help of a bare install has not.
        from blockrelay_launcher.onnx_blocks.stand_in import imported_stand_in

        imported = imported_stand_in(options.folder, model, max_position=options.max_position)
    settings = {
        "sequential": "true" if options.sequential else None,
        "max_warm_sessions": options.max_warm_sessions,
        "warm_session_bytes": options.memory,
    }
    warm = {name: value for name, value in settings.items() if value is not None}
    return ServedBlocks(model=model, warm=warm, imported=imported)


def _described(folder: Path, max_position: int | None) -> Path:
    """The folder that services serve the blocks of `folder` from."""
    argv = [sys.executable, "-P", "-m", _MODULE]
    argv += [] if max_position is None else ["--max-position", str(max_position)]
    with worker([*argv, "--", str(folder)]) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        code = process.wait()
    if code or not line:
        raise typer.Exit(code_of_silence(code))
    described = decode_described(line)
    for lacking in described.lacking:
        sys.stderr.write(f"{folder}: {lacking}\n")
    return Path(described.folder)
