"""Gives llama.cpp's logits for windows of tokens: `logits_llamacpp.py GGUF FOLDER [--kind Q8_0]`.

Prints a line when the model is loaded. Reads windows from stdin, each a line with a JSON list of token ids, and writes
the logits [tokens, vocabulary] behind each token into FOLDER/window.npy; then it prints a line.
"""

import argparse
import ctypes
import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np

#: The name of a file's type -> llama.cpp's constant.
KINDS = {
    "F32": llama_cpp.LLAMA_FTYPE_ALL_F32,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}


def main() -> int:
    """Converts the file if asked to, answers until the end of stdin, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", default="", help="convert to this type first")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=512, help="most tokens of a window")
    options = parser.parse_args()
    path = convert(options.gguf, options.folder, options.kind, options.threads) if options.kind else options.gguf
    model = llama_cpp.Llama(
        str(path),
        n_ctx=options.tokens,
        n_batch=options.tokens,
        n_threads=options.threads,
        n_threads_batch=options.threads,
        logits_all=True,
        verbose=False,
    )
    answer()
    for line in sys.stdin:
        tokens = json.loads(line)
        model.reset()
        model.eval(tokens)
        np.save(options.folder / "window.npy", np.asarray(model.scores[: len(tokens)], np.float32))
        answer()
    return 0


def convert(gguf: Path, folder: Path, kind: str, threads: int) -> Path:
    """Writes the model as `kind` into the folder, and returns the path. Raises RuntimeError if llama.cpp fails."""
    path = folder / f"{kind}.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = KINDS[kind], threads, True
    if llama_cpp.llama_model_quantize(str(gguf).encode(), str(path).encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp cannot convert to {kind}")
    return path


def answer() -> None:
    """Prints the line that ends a step."""
    print("done", flush=True)


if __name__ == "__main__":
    sys.exit(main())
