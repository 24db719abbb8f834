"""Makes a model and a draft model for it: `python -m bench.draft_pair OUT [--shape llama75m] [--noise 0.0]`.

Only the first layer of the model `OUT/served` changes its hidden states: the others are computed and add nothing. The
draft model `OUT/draft` is that layer and the head, so that without noise nearly all of its guesses are right, and the
times are those of a real model of this shape with a real draft model. `--noise` is the deviation of what is added to
the weights of the draft's head, as a share of theirs: with more of it fewer guesses are right.

    python -m bench.pairs . --model OUT/served --env BLOCKRELAY_DRAFT_MODEL=OUT/draft --new 512
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from bench.checkpoint import SHAPES, write_checkpoint
from blockrelay_converter.convert import convert

INDEX = "model.safetensors.index.json"


def write_pair(out: Path, *, shape: str, precision: str, noise: float) -> None:
    """Writes both block folders into `out`."""
    with tempfile.TemporaryDirectory(dir=out) as folder:
        checkpoint = Path(folder) / "checkpoint"
        write_checkpoint(shape, checkpoint)
        index: dict[str, str] = json.loads((checkpoint / INDEX).read_text())["weight_map"]
        for file in sorted(set(index.values())):
            _silence(checkpoint / file)
        convert(checkpoint, out / "served", precision=precision, report=_report)
        _shorten(checkpoint, index, noise)
        convert(checkpoint, out / "draft", precision=precision, report=_report)


def _silence(file: Path) -> None:
    """Replaces with zeros what layers add to the residual stream, in all but the first."""
    tensors = load_file(file)
    for name in tensors:
        adds = name.endswith(("o_proj.weight", "down_proj.weight"))
        if adds and not name.startswith("model.layers.0."):
            tensors[name] = np.zeros_like(tensors[name])
    save_file(tensors, file, metadata={"format": "pt"})


def _shorten(checkpoint: Path, index: dict[str, str], noise: float) -> None:
    """Leaves only the first layer, and adds noise to the head."""
    kept = {name: file for name, file in index.items() if ".layers." not in name or ".layers.0." in name}
    (checkpoint / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": kept}))
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    file = checkpoint / kept["lm_head.weight"]
    tensors = load_file(file)
    head: NDArray[np.float16] = tensors["lm_head.weight"]
    added = np.random.default_rng(2).standard_normal(head.shape, np.float32) * noise * float(head.std())
    tensors["lm_head.weight"] = (head + added).astype(np.float16)
    save_file(tensors, file, metadata={"format": "pt"})


def _report(what: str, done: int, total: int) -> None:
    """Says nothing: it takes seconds."""


def main() -> int:
    """Writes the pair and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama75m")
    parser.add_argument("--precision", default="w8a8")
    parser.add_argument("--noise", type=float, default=0.0)
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    write_pair(options.out, shape=options.shape, precision=options.precision, noise=options.noise)
    return 0


if __name__ == "__main__":
    sys.exit(main())
