"""A folder as Hugging Face's cache has it."""

import hashlib
import shutil
from pathlib import Path

REVISION = "0123456789abcdef0123456789abcdef01234567"


def cached(folder: Path, cache: Path, *, name: str = "models--acme--tiny-1b") -> Path:
    """A snapshot with the files of `folder`, in a cache: links into the repository's `blobs`."""
    blobs, snapshot = cache / name / "blobs", cache / name / "snapshots" / REVISION
    blobs.mkdir(parents=True)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        blob = blobs / hashlib.sha256(str(file).encode()).hexdigest()
        shutil.copyfile(file, blob)
        place = snapshot / file.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        up = "/".join([".."] * (len(place.relative_to(cache / name).parts) - 1))
        place.symlink_to(f"{up}/blobs/{blob.name}")
    return snapshot
