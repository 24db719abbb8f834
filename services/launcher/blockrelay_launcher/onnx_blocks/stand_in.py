"""Provides the import with which CPUs compute while a GPU runs ONNX blocks as they are (`up --blocks --gpu`).

The import lies in the cache beside the description of the blocks. If they cannot be imported, CPUs run the files.

    imported/       the import
    imported.lock   locked by the `up` that checks or makes the import: others wait
    imported.used   locked (shared) by every running `up` that serves with the import: it is not replaced or removed
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
from blockrelay.host.child_command import last_line
from blockrelay.onnx_blocks.blocks_file import why_no_stand_in
from blockrelay_launcher.onnx_blocks.importing import ImportCommandOptions, watch
from blockrelay_launcher.onnx_blocks.worker import run_worker

_FOLDER, _UNFINISHED, _LOCK, _USED = "imported", ".imported.unfinished", "imported.lock", "imported.used"


@dataclass(frozen=True, slots=True)
class HeldImport:
    """The block folder with which CPUs compute."""

    folder: Path
    held: int
    """File descriptor of the shared lock, which must stay open while the import is used."""


def held_import(blocks: Path, served: Path) -> HeldImport | str:
    """Returns the import of the folder `blocks`, or a text that explains why there can be none.

    `served` is the block folder that describes the blocks. A missing import is made, with a line on stderr; an
    interrupted one continues at the next start. Unused imports of earlier contents of the files are removed. Raises
    BlockFolderError if `served` is no right block folder, WireError if the converter's output is no report.
    """
    try:
        with _locked(served / _LOCK, message=f"{blocks}: waits for another `up`, which imports them"):
            _remove_former(served)
            return _existing_or_new(blocks, served)
    except OSError as error:
        return str(error)


def _existing_or_new(blocks: Path, served: Path) -> HeldImport | str:
    """Returns the existing import or makes one, or returns why there can be none. The caller holds `imported.lock`."""
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
            sys.stderr.write("interrupted: the next start continues the import\n")
        raise
    os.close(used)
    return why


def _remove_former(served: Path) -> None:
    """Removes imports of earlier contents of the same folder.

    Descriptions of the same files with another context or other text files keep their imports: a user may return to
    them.
    """
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
    """Returns why the folder `imported` cannot stand in for the blocks that `served` describes; empty: it can.

    The import is read whole and checked, because a worker that finds it altered can only end.
    """
    try:
        description, candidate = open_block_folder(served, blocks=[]), open_block_folder(imported)
    except BlockFolderError as error:
        return str(error)
    return why_no_stand_in(description.manifest, candidate.manifest)


def _imported(blocks: Path, served: Path, out: Path) -> str:
    """Runs the converter's process and returns why the import failed; "": it did not."""
    model = open_block_folder(served, blocks=[]).model
    options = ImportCommandOptions(
        folder=blocks, out=out, name=model.name, max_position=model.max_position, served=served
    )
    with tempfile.TemporaryFile() as errors:
        result, code = run_worker(options.argv(), watch, errors=errors)
        if not code and result is not None:
            return ""
        errors.seek(0)
        return last_line(errors.read(), code)


@contextmanager
def _locked(path: Path, *, message: str = "") -> Iterator[None]:
    """Holds an exclusive lock. If another process has it, prints `message` and waits; without one, BlockingIOError."""
    try:
        lock = _lock_of(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not message:
            raise
        sys.stderr.write(f"{message}\n")
        lock = _lock_of(path, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(lock)


def _lock_of(path: Path, how: int) -> int:
    """Returns an open file with the lock `how` (of flock), which ends when it is closed. Raises BlockingIOError."""
    try:
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:  # a complete cache may lie on a read-only file system
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(opened, how)
    except BaseException:
        os.close(opened)
        raise
    return opened
