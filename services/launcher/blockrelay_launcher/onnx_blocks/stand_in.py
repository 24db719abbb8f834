"""`up --blocks --gpu`: what CPUs compute with where a GPU runs ONNX blocks as they are: an import of them, kept in the
cache beside their description, or the files themselves where they cannot be imported."""

import shutil
import sys
import tempfile
from pathlib import Path

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.errors import BlockFolderError
from blockrelay.onnx_blocks.served_manifest import why_no_stand_in
from blockrelay.quantities import format_quantity
from blockrelay_launcher.onnx_blocks.importing import ImportOptions, watch
from blockrelay_launcher.onnx_blocks.worker import how_it_ended, worker

_FOLDER = "imported"


def imported_stand_in(blocks: Path, served: Path, *, max_position: int | None) -> Path | None:
    """The import of the folder `blocks`, which is served as the folder `served` describes; made where it is not there
    yet. None where there can be none: stderr says why."""
    out = served / _FOLDER
    why = _why_not(served, out) if out.exists() else "it is not there"
    if why:
        shutil.rmtree(out, ignore_errors=True)  # an import of what these files were before, or of an older release
        why = _imported(ImportOptions(
            folder=blocks, out=out, precision=None, text=None, name=blocks.resolve().name, max_position=max_position,
            afresh=True,
        )) or _why_not(served, out)  # fmt: skip
        if not why:
            size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
            sys.stderr.write(f"{blocks}: imported for the CPU as {out}, {format_quantity(size, 'B')}\n")
    if why:
        shutil.rmtree(out, ignore_errors=True)
        sys.stderr.write(f"{blocks}: the CPU runs the files too, since they cannot be imported: {why}\n")
        return None
    return out


def _why_not(served: Path, imported: Path) -> str:
    """See `why_no_stand_in`."""
    try:
        folders = [open_block_folder(root, blocks=[]) for root in (served, imported)]
    except BlockFolderError as error:
        return str(error)
    return why_no_stand_in(folders[0].manifest, folders[1].manifest)


def _imported(options: ImportOptions) -> str:
    """Has the converter import. Why it could not; "": it has."""
    with tempfile.TemporaryFile() as said:
        with worker(options.argv(), said=said) as process:
            assert process.stdout is not None
            result = watch(process.stdout)
            code = process.wait()
        if not code and result is not None:
            return ""
        said.seek(0)
        last = said.read().decode(errors="replace").strip().rpartition("\n")[2].removeprefix("error: ")
    return last or f"the process that imports has ended {how_it_ended(code)}"
