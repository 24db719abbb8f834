"""`python -m blockrelay_worker.offline.numerics MODEL`: prints the numerics id of a block folder on this machine."""

import sys
from pathlib import Path

from blockrelay.block_folder.folder import open_block_folder
from blockrelay_worker.execution.numerics_id import numerics_id

if __name__ == "__main__":
    sys.stdout.write(numerics_id(open_block_folder(Path(sys.argv[1]), blocks=[]).manifest) + "\n")
