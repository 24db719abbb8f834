"""Prepares `blockrelay up --blocks`: a process of the worker describes ONNX blocks, which are served as they are."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import typer

from blockrelay.errors import UsageError
from blockrelay.onnx_blocks.reports.codec import decode
from blockrelay.onnx_blocks.reports.describing import Described
from blockrelay.typed_command import typed
from blockrelay_launcher.onnx_blocks.stand_in import HeldImport, held_import
from blockrelay_launcher.onnx_blocks.worker import code_of_silence, command_of, run_worker
from blockrelay_launcher.up_options.groups import ServedModelOptions

_MODULE = "blockrelay_worker.offline.onnx_blocks.describe"


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedBlocks:
    """ONNX blocks that are served as they are."""

    folder: Path
    """The folder of the blocks."""
    model: Path
    """The block folder that describes them, from which services serve."""
    warm: Mapping[str, object] = field(default_factory=dict[str, object])
    """The worker's settings of warm sessions, for blocks that run one by one."""
    imports: bool = False
    """True if CPUs are to compute with an import of `folder`, if possible."""
    demands: bool = False
    """True if the user demands the import."""
    imported: HeldImport | None = None
    """The import, once it exists; None: CPUs compute with the files themselves."""

    def with_import(self, *, stages: int) -> "DescribedBlocks":
        """Returns the blocks with their import, if it is wanted and possible, and prints what CPUs compute with.

        Importing takes as long as reading and writing the blocks. With several `stages` there is no import, because it
        does not give the masks and rotations that the blocks on a GPU need. Raises UsageError if the user demands an
        import and there can be none, BlockFolderError and WireError as `held_import`.
        """
        if self.demands and stages > 1:
            raise UsageError(
                f"--stand-in imported is for one stage, and the plan has {stages}: with --stand-in files CPUs run the "
                f"files too; or serve the whole import: {typed('import')}, then up --model"
            )
        if not self.imports or stages > 1:
            return self
        held = held_import(self.folder, self.model)
        if isinstance(held, HeldImport):
            sys.stderr.write(f"{self.folder}: the CPU computes with their import ({held.folder})\n")
            return replace(self, imported=held)
        if self.demands:
            raise UsageError(f"--stand-in imported: {self.folder} cannot be imported: {held}")
        why = f"since they cannot be imported: {held} (--stand-in files does not try)"
        sys.stderr.write(f"{self.folder}: the CPU runs the files too, {why}\n")
        return self


def served_blocks(options: ServedModelOptions, *, gpus: bool) -> DescribedBlocks | None:
    """Returns the ONNX blocks that `up` is to serve; None without `--blocks`. Prints a line for each missing setting.

    `gpus`: `up` also starts workers on GPUs. Raises UsageError for options that do not go together, typer.Exit if the
    worker has printed an error, and WireError if its report cannot be read.
    """
    options.check_stand_in(gpus=gpus)
    if options.blocks is None:
        return None
    description = described(options.blocks, options.max_position)
    for lacking in description.lacking:
        sys.stderr.write(f"{options.blocks}: {lacking}\n")
    settings = {
        "sequential": "true" if options.sequential else None,
        "max_warm_sessions": options.max_warm_sessions,
        "warm_session_bytes": options.memory,
    }
    return DescribedBlocks(
        folder=options.blocks,
        model=Path(description.folder),
        warm={name: value for name, value in settings.items() if value is not None},
        imports=gpus and not options.sequential and options.stand_in != "files",
        demands=options.stand_in == "imported",
    )


def described(folder: Path, max_position: int | None) -> Described:
    """Returns the description of the blocks in `folder`, with the block folder from which services serve them.

    `max_position` is the length of the context in tokens; None: the one that the files name, else a default. Raises
    typer.Exit if the worker has printed an error, WireError if its report cannot be read.
    """
    command = command_of(_MODULE, folder, max_position=max_position)
    line, code = run_worker(command, lambda lines: lines.readline())
    if code or not line:
        raise typer.Exit(code_of_silence(code))
    return decode(Described, line)
