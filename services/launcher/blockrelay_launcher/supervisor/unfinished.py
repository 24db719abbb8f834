"""Finds out which models the unfinished requests of a data folder are for, and what serves a model to their end.

A request is finished only by workers of the model that it was accepted for. `DATA/served.json` has the folder of the
model that was served last.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from blockrelay.block_folder.folder import MODEL_KEY_DIGITS, open_block_folder
from blockrelay.block_folder.manifest import MANIFEST_NAME
from blockrelay.errors import BlockFolderError, RedisTrouble, ServiceUnavailable, UsageError
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.number import is_spoken, number_of
from blockrelay.redis.client import connect
from blockrelay.settings import BUNDLED_MODEL
from blockrelay.typed_command import typed, typed_path
from blockrelay.up_file import read_running
from blockrelay_launcher.up_options.groups import NetworkOptions
from blockrelay_launcher.up_options.options import UpOptions

_SERVED_NAME = "served.json"
_PROCEDURE = "docs/procedures/new-numbers.md"
#: Records that are read in one round trip.
_READ_AT_ONCE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """The content of served.json: a model, and the option of `up` that named it with its folder."""

    model: str  # its key in Redis
    option: str  # model or blocks
    folder: str  # absolute


def read_unfinished(url: str, keys: Keys) -> dict[str, int]:
    """Returns the number of unfinished requests of a cell by the key of their model; `url` is its control Redis.

    It is empty for a cell of another protocol, whose records this release cannot read. Raises ServiceUnavailable if
    Redis, which answered before, is gone.
    """
    counts = Counter[str]()
    with connect(url) as client:
        try:
            if not is_spoken(number_of(cast("bytes | None", client.get(keys.protocol)))):
                return {}
            ids = [name.decode() for name in cast("list[bytes]", client.zrange(keys.running, 0, -1))]
            for first in range(0, len(ids), _READ_AT_ONCE):
                pipeline: Any = client.pipeline(transaction=False)
                for request_id in ids[first : first + _READ_AT_ONCE]:
                    pipeline.hget(keys.request(request_id), "model")
                counts.update(model.decode() for model in pipeline.execute() if model)
        except RedisTrouble as error:
            raise ServiceUnavailable(f"the control Redis answered at first and does not any more: {error}") from error
    return dict(counts)


def remember_served(options: UpOptions, data: Path, model: str) -> None:
    """Writes served.json, complete or not at all: `options` serve `model` (its key) with the folder `data`."""
    option, folder = _served_by(options)
    draft = data / f"{_SERVED_NAME}.new"
    draft.write_text(json.dumps(asdict(_Served(model=model, option=option, folder=str(folder.absolute())))))
    draft.replace(data / _SERVED_NAME)


def why_not_served(counts: Mapping[str, int], model: str, options: UpOptions, data: Path) -> str:
    """Returns a line about the requests in `counts` that are not of `model`; empty if there are none.

    `counts` is the result of `read_unfinished` for the Redis in `data`, and `options` serve `model`. The line says how
    many there are, of which model, and what finishes them. Raises UsageError with the line if none is of `model`; else
    the folders of both models would be refused for each other's requests.
    """
    others = {other: count for other, count in counts.items() if other != model}
    if not others:
        return ""
    found = {other: served for other in others if (served := _find_served(data, other)) is not None}
    listed = ", ".join(
        f"{count} of {other}" + (f" ({found[other].folder})" if other in found else "")
        for other, count in others.items()
    )
    served = next(iter(found.values()), None)
    if served is not None and _opens(served):
        how = f"with `{typed(_words(served.option, Path(served.folder), options, data))}`"
    else:
        option, folder = (served.option, typed_path(Path(served.folder))) if served else ("model", "FOLDER")
        what = "release" if served else "folder, and the release,"
        how = f"with the {what} that accepted them (`blockrelay up --data {typed_path(data)} --{option} {folder}`)"
    line = (
        f"{typed_path(data)} has unfinished requests of another model than {_served_by(options)[1]}: {listed}; "
        f"let them end first, {how}, or give another --data, which leaves them there ({_PROCEDURE})"
    )
    if model not in counts:
        raise UsageError(line)
    return line


def continuing(options: UpOptions, data: Path) -> str:
    """Returns the words of a command that serves the same model on the same port with the folder `data`. Pure."""
    return _words(*_served_by(options), options, data)


def _served_by(options: UpOptions) -> tuple[str, Path]:
    """Returns the name of the option that says what is served, and the folder that it names."""
    return ("blocks", options.blocks.folder) if options.blocks is not None else ("model", options.model)


def _words(option: str, folder: Path, options: UpOptions, data: Path) -> str:
    """Returns the words of a command that serves `folder` with `data`, on the port of `options`."""
    words = ["up", "--data", typed_path(data)]
    if folder != BUNDLED_MODEL:
        words += [f"--{option}", typed_path(folder)]
    if options.network.port != NetworkOptions().port:
        words += ["--port", str(options.network.port)]
    return " ".join(words)


def _find_served(data: Path, model: str) -> _Served | None:
    """Returns how `model` was served with `data`; None if nothing says so, or if the folder has another model now.

    Releases before served.json, when they were killed, have left an up.json.
    """
    try:
        served = _Served(**json.loads((data / _SERVED_NAME).read_text()))
    except (OSError, ValueError, TypeError):
        served = None
    if served is not None and served.model == model:
        return served if served.option == "blocks" or _is_in(Path(served.folder), model) else None
    try:
        folder = Path(read_running(data).model)
    except UsageError:
        return None
    return _Served(model=model, option="model", folder=str(folder)) if _is_in(folder, model) else None


def _is_in(folder: Path, model: str) -> bool:
    """Returns whether `model` is the key of the model in a block folder of this or another release."""
    try:
        content = (folder / MANIFEST_NAME).read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content).hexdigest()[:MODEL_KEY_DIGITS] == model


def _opens(served: _Served) -> bool:
    """Returns whether this release opens the folder; it is not asked about ONNX blocks."""
    if served.option == "blocks":
        return True
    try:
        open_block_folder(served.folder, blocks=[])
    except BlockFolderError:
        return False
    return True
