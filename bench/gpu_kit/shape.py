"""Makes a 1.1B block folder with random weights, in seconds: `python -m bench.gpu_kit.shape OUT [--small]`."""

import argparse
import shutil
import sys
import time
from pathlib import Path

from bench.checkpoint import write_checkpoint
from bench.gpu_kit.parts import tell
from blockrelay_converter.convert import convert

SHAPE, SMALL = "llama1b", "tiny"


def main() -> int:
    """Makes the block folder, reports its figures, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    shape, began = SMALL if options.small else SHAPE, time.perf_counter()
    checkpoint = options.out.with_name("checkpoint")
    write_checkpoint(shape, checkpoint, quick=True)
    written = time.perf_counter()
    convert(checkpoint, options.out, precision="fp16", report=lambda *_: None, name=shape, answers=False)
    shutil.rmtree(checkpoint)
    tell(
        {
            "shape": shape,
            "write_s": round(written - began, 2),
            "convert_s": round(time.perf_counter() - written, 2),
            "bytes": sum(file.stat().st_size for file in options.out.rglob("*") if file.is_file()),
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
