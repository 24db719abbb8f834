"""`blockrelay up --blocks`: has the worker describe ONNX blocks that are to be served as they are."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import typer

from blockrelay.errors import UsageError
from blockrelay.onnx_blocks.report import Described, decode_described
from blockrelay.typed_command import typed
from blockrelay_launcher.onnx_blocks.stand_in import HeldImport, held_import
from blockrelay_launcher.onnx_blocks.worker import code_of_silence, worker

_MODULE = "blockrelay_worker.offline.onnx_blocks.describe"
StandInBy = Literal["imported", "files"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksOptions:
    """The options of `up` about ONNX blocks; None and False: not given."""

    folder: Path | None
    max_position: int | None
    stand_in: StandInBy | None
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
    """ONNX blocks that are served from the folder `model`, which describes them. `warm` are the worker's settings of
    blocks that are run one by one. Where `imports` CPUs are to compute with an import of `folder` if there can be one,
    which somebody `demands`; `imported` is that, once it is there. None: with the files themselves."""

    folder: Path
    model: Path
    warm: Mapping[str, object] = field(default_factory=dict[str, object])
    imports: bool = False
    demands: bool = False
    imported: HeldImport | None = None

    def with_import(self, *, stages: int) -> "ServedBlocks":
        """The same, imported where it is to be: that may take as long as reading and writing the blocks. stderr has a
        line that says what CPUs compute with. In several `stages` it is the files: an import gives the blocks of a
        device no masks and rotations. Raises UsageError where there can be no import, and one is demanded."""
        if self.demands and stages > 1:
            raise UsageError(
                f"--stand-in imported is for one stage, and the plan has {stages}: with --stand-in files CPUs run the "
                f"files too; or serve the whole import: {typed('import')}, then up --model"
            )
        if not self.imports or stages > 1:
            return self
        found = held_import(self.folder, self.model)
        if isinstance(found, HeldImport):
            sys.stderr.write(f"{self.folder}: the CPU computes with their import ({found.folder})\n")
            return replace(self, imported=found)
        if self.demands:
            raise UsageError(f"--stand-in imported: {self.folder} cannot be imported: {found}")
        why = f"since they cannot be imported: {found} (--stand-in files does not try)"
        sys.stderr.write(f"{self.folder}: the CPU runs the files too, {why}\n")
        return self


def served_blocks(options: BlocksOptions, *, gpus: bool) -> ServedBlocks | None:
    """None where no blocks are asked for. stderr has a line for what no file says.

    Raises UsageError for options that do not go together, and typer.Exit where the worker has said what is wrong.
    """
    options.check(gpus=gpus)
    if options.folder is None:
        return None
    found = described(options.folder, options.max_position)
    for lacking in found.lacking:
        sys.stderr.write(f"{options.folder}: {lacking}\n")
    settings = {
        "sequential": "true" if options.sequential else None,
        "max_warm_sessions": options.max_warm_sessions,
        "warm_session_bytes": options.memory,
    }
    return ServedBlocks(
        folder=options.folder,
        model=Path(found.folder),
        warm={name: value for name, value in settings.items() if value is not None},
        imports=gpus and not options.sequential and options.stand_in != "files",
        demands=options.stand_in == "imported",
    )


def described(folder: Path, max_position: int | None) -> Described:
    """The folder that services serve the blocks of `folder` from. Raises typer.Exit where the worker has said what is
    wrong."""
    argv = [sys.executable, "-P", "-m", _MODULE]
    argv += [] if max_position is None else ["--max-position", str(max_position)]
    with worker([*argv, "--", str(folder)]) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        code = process.wait()
    if code or not line:
        raise typer.Exit(code_of_silence(code))
    return decode_described(line)
