"""Hugging Face's cache: folders `models--ORGANISATION--NAME/snapshots/REVISION`, whose files are links into `blobs`."""

import re
from pathlib import Path

#: What Hugging Face's hub calls a model: organisation/name.
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_PREFIX = "models--"


def cached_repository(folder: Path) -> Path | None:
    """The repository's folder in the cache (`models--...`) of which `folder` is a snapshot, or a part of one."""
    folder = folder.resolve()
    for place in (folder, *folder.parents):
        repository = place.parent.parent
        if place.parent.name == "snapshots" and is_repository(repository):
            return repository
    return None


def is_repository(folder: Path) -> bool:
    """True for the folder of a repository itself, by its name."""
    return folder.name.startswith(_PREFIX) and len(folder.name) > len(_PREFIX)


def model_name(folder: Path) -> str:
    """What a model in `folder` is called: of a snapshot organisation/name, else as the folder."""
    repository = cached_repository(folder)
    if repository is None:
        return folder.resolve().name
    return "/".join(repository.name.removeprefix(_PREFIX).split("--"))


def is_within(resolved: Path, folder: Path) -> bool:
    """True for a path without links that lies in `folder`, or in the repository of which it is a snapshot."""
    root = folder.resolve()
    repository = cached_repository(folder)
    return resolved.is_relative_to(root) or (repository is not None and resolved.is_relative_to(repository))
