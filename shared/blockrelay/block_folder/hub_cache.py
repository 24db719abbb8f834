"""Finds models in Hugging Face's cache, which has folders `models--ORGANISATION--NAME/snapshots/REVISION` with links
into `blobs` as their files."""

import re
from pathlib import Path

#: The name of a model on Hugging Face's hub: organisation/name.
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_PREFIX = "models--"


def cached_repository(folder: Path) -> Path | None:
    """Returns the repository's folder (`models--...`) if `folder` is a snapshot in the cache, or in one; else None."""
    folder = folder.resolve()
    for place in (folder, *folder.parents):
        repository = place.parent.parent
        if place.parent.name == "snapshots" and is_repository(repository):
            return repository
    return None


def is_repository(folder: Path) -> bool:
    """Returns whether `folder` is called like a repository in the cache (`models--...`)."""
    return folder.name.startswith(_PREFIX) and len(folder.name) > len(_PREFIX)


def model_name(folder: Path) -> str:
    """Returns the name of the model in `folder`: organisation/name for a snapshot, else the name of the folder."""
    repository = cached_repository(folder)
    if repository is None:
        return folder.resolve().name
    return "/".join(repository.name.removeprefix(_PREFIX).split("--"))


def is_within(resolved: Path, folder: Path) -> bool:
    """Returns whether `resolved`, a path without links, lies in `folder` or in the repository of which that is a
    snapshot."""
    root = folder.resolve()
    repository = cached_repository(folder)
    return resolved.is_relative_to(root) or (repository is not None and resolved.is_relative_to(repository))
