"""`up --blocks --gpu`: what CPUs compute with where a GPU runs ONNX blocks as they are: an import of them, kept in the
cache beside their description, or the files themselves where they cannot be imported.

    imported/       the import
    imported.lock   held by who looks at it, or makes it: others wait
    imported.used   held by every `up` that serves with it, for its life: nobody makes it anew then, or removes it
"""

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.block_folder.manifest import MANIFEST_NAME, decode_manifest
from blockrelay.errors import BlockFolderError
from blockrelay.exit_codes import PREFIX
from blockrelay.onnx_blocks.blocks_file import why_no_stand_in
from blockrelay_launcher.onnx_blocks.importing import ImportOptions, watch
from blockrelay_launcher.onnx_blocks.worker import how_it_ended, worker

_FOLDER, _UNFINISHED, _LOCK, _USED = "imported", ".imported.unfinished", "imported.lock", "imported.used"


@dataclass(frozen=True, slots=True)
class HeldImport:
    """The block folder that CPUs compute with. `held` is a file that must stay open while somebody does."""

    folder: Path
    held: int


def held_import(blocks: Path, served: Path) -> HeldImport | str:
    """The import of the folder `blocks`, which is served as the folder `served` describes; made where it is not there
    yet, which a line on stderr says. Or why there can be none.

    Imports of what the files were before are removed, where nobody serves with them. Whatever ends this process, the
    next start goes on with what is imported.
    """
    try:
        with _locked(served / _LOCK, told=f"{blocks}: waits for another `up`, which imports them"):
            _remove_former(served)
            return _found_or_made(blocks, served)
    except OSError as error:
        return str(error)


def _found_or_made(blocks: Path, served: Path) -> HeldImport | str:
    """See `held_import`. Only for who has the lock."""
    out = served / _FOLDER
    why = _why_not(served, out) if out.exists() else "it is not there"
    if not why:
        return HeldImport(out, _lock_of(served / _USED, fcntl.LOCK_SH))
    try:
        used = _lock_of(served / _USED, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return f"{why}; another `up` serves with it"
    try:
        shutil.rmtree(out, ignore_errors=True)
        sys.stderr.write(f"{blocks}: imports them for the CPU; --stand-in files does without\n")
        why = _imported(blocks, served, out) or _why_not(served, out)
        if not why:
            fcntl.flock(used, fcntl.LOCK_SH)
            return HeldImport(out, used)
    except BaseException as error:
        os.close(used)
        if isinstance(error, KeyboardInterrupt):
            sys.stderr.write("interrupted: the next start goes on with what is imported\n")
        raise
    os.close(used)
    return why


def _remove_former(served: Path) -> None:
    """Of descriptions of the same folder with other files in it. Those of the same files differ in their context, or
    in what is said beside them of text: somebody may come back to them."""
    files = open_block_folder(served, blocks=[]).manifest.onnx_files()
    for former in served.parent.iterdir():
        if not any((former / name).exists() for name in (_FOLDER, _UNFINISHED)):
            continue
        with suppress(OSError, BlockFolderError):
            if decode_manifest((former / MANIFEST_NAME).read_bytes()).onnx_files() == files:
                continue
        with suppress(OSError), _locked(former / _LOCK), _locked(former / _USED):
            for name in (_FOLDER, _UNFINISHED):
                shutil.rmtree(former / name, ignore_errors=True)


def _why_not(served: Path, imported: Path) -> str:
    """See `why_no_stand_in`. The import is read whole: a worker that finds it altered only ends."""
    try:
        of, found = open_block_folder(served, blocks=[]), open_block_folder(imported)
    except BlockFolderError as error:
        return str(error)
    return why_no_stand_in(of.manifest, found.manifest)


def _imported(blocks: Path, served: Path, out: Path) -> str:
    """Has the converter import. Why it could not; "": it has."""
    model = open_block_folder(served, blocks=[]).model
    options = ImportOptions(
        folder=blocks,
        out=out,
        precision=None,
        text=None,
        name=model.name,
        max_position=model.max_position,
        served=served,
    )
    with tempfile.TemporaryFile() as said:
        with worker(options.argv(), said=said) as process:
            assert process.stdout is not None
            result = watch(process.stdout)
            code = process.wait()
        if not code and result is not None:
            return ""
        said.seek(0)
        last = said.read().decode(errors="replace").strip().rpartition("\n")[2].removeprefix(PREFIX)
    return last or f"the process that imports has ended {how_it_ended(code)}"


@contextmanager
def _locked(path: Path, *, told: str = "") -> Iterator[None]:
    """Alone. Whoever else is there is waited for, once `told` is said; without it BlockingIOError."""
    try:
        lock = _lock_of(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not told:
            raise
        sys.stderr.write(f"{told}\n")
        lock = _lock_of(path, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(lock)


def _lock_of(path: Path, how: int) -> int:
    """An open file with the lock, which goes when it is closed. Raises BlockingIOError."""
    try:
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:  # a cache that is complete may lie where nobody can write
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(opened, how)
    except BaseException:
        os.close(opened)
        raise
    return opened
