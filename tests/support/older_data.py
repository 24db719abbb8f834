"""What older releases left behind: append-only files of releases that were ended with `kill -9`, all processes at once.

`up` on the bundled model, cell c0, some requests in the middle of their answers and some that nobody had begun.
"""

import gzip
from pathlib import Path

from tests.support.project import ROOT

LEFT = sorted((ROOT / "tests" / "recovery" / "data").glob("*.aof.gz"))
CELL = "c0"


def name_of(left: Path) -> str:
    """For people: the release or the protocol."""
    return left.name.removesuffix(".aof.gz")


def restore(left: Path, folder: Path) -> None:
    """Make `folder` the data folder of a Redis that has it."""
    folder.mkdir(parents=True)
    (folder / "appendonly.aof").write_bytes(gzip.decompress(left.read_bytes()))
