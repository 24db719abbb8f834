"""A folder of files as the kubelet shows a Secret: `..data` is a link, and a change replaces it, all files at once."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path


class SwappedFolder:
    """Each file is a link through `..data` into the folder of the version that is in force."""

    def __init__(self, place: Path, files: Mapping[str, str]) -> None:
        self.place = place
        place.mkdir()
        self.swap(files)
        for name in files:
            (place / name).symlink_to(Path("..data") / name)

    def __truediv__(self, name: str) -> Path:
        return self.place / name

    def swap(self, files: Mapping[str, str]) -> None:
        """Another version of the files, in force at once; the version before is gone."""
        link = self.place / "..data"
        before = link.resolve() if link.is_symlink() else None
        version = Path(tempfile.mkdtemp(prefix="..version_", dir=self.place))
        for name, text in files.items():
            (version / name).write_text(text)
        (self.place / "..data_tmp").symlink_to(version.name)
        os.replace(self.place / "..data_tmp", link)
        if before is not None:
            shutil.rmtree(before)
