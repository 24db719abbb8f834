"""The report of the worker on a folder of ONNX blocks that it has made ready to be served."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Described:
    """The result of `blockrelay_worker.offline.onnx_blocks.describe`."""

    folder: str
    """The block folder that describes the blocks, from which services serve them."""
    lacking: tuple[str, ...]
    """What no file beside the blocks says, such as the end of a text; one line each."""
