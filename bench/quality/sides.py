"""What is compared with float32: the product's formats, and llama.cpp's on the same GGUF file."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from bench.environments import PEERS, install, last_line, python_of
from bench.quality.figures import Logits
from bench.quality.texts import CALIBRATION, WINDOW
from bench.runs import BLOCKRELAY, ENVS, ROOT, Failed, run
from blockrelay.block_folder.folder import open_block_folder
from blockrelay_worker.offline.evaluate import CHUNK_ROWS
from blockrelay_worker.offline.pipeline import Pipeline

REFERENCE = "fp32"
_PEER = next(peer for peer in PEERS if peer.name == "llamacpp")
_SCRIPT = ROOT / "bench" / "peers" / "logits_llamacpp.py"


class Side(Protocol):
    """A model in one format, loaded."""

    bytes: int
    """The size of its files."""

    def logits(self, tokens: Sequence[int]) -> Logits:
        """Returns the logits [tokens, vocabulary] behind each of at most WINDOW tokens. Raises Failed."""
        ...

    def close(self) -> None:
        """Frees the model."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of the product: the precision of the conversion, and whether it is calibrated."""

    precision: str
    calibrated: bool = False

    @property
    def title(self) -> str:
        """The name in tables."""
        title = self.precision.replace(f",block_{_HEAD}=", ", head in ")
        return f"{title}, calibrated" if self.calibrated else title


#: The model's last block, whose weights have 8 bits in the file; all other linear layers have 4.
_HEAD = 31
FORMATS = (
    Format(precision="w8a8"),
    Format(precision="w8a8", calibrated=True),
    Format(precision=f"w4a8,block_{_HEAD}=w8a8"),
    Format(precision=f"w4a8,block_{_HEAD}=w8a8", calibrated=True),
    Format(precision="w4a8"),
    Format(precision="w4a8", calibrated=True),
)
#: llama.cpp's formats by title: the type that it converts the file to; an empty one leaves the file as it is.
LLAMACPP = {
    "llama.cpp, F32": "F32",
    "llama.cpp, the file (Q4_1)": "",
    "llama.cpp, Q8_0": "Q8_0",
    "llama.cpp, Q4_0": "Q4_0",
    "llama.cpp, Q4_K_M": "Q4_K_M",
}


class BlockFolderSide:
    """A block folder, run by the product's executor in this process on `threads` threads."""

    def __init__(self, folder: Path, *, threads: int) -> None:
        opened = open_block_folder(folder)
        self._vocabulary = opened.model.vocab_size
        self._pipeline = Pipeline(opened, stages=1, threads=threads, tokens=WINDOW)
        self.numerics = self._pipeline.numerics
        self.bytes = sum(file.bytes for file in opened.manifest.files.values())

    def logits(self, tokens: Sequence[int]) -> Logits:
        """Returns the logits behind each token (see `Side`)."""
        result = np.empty((len(tokens), self._vocabulary), np.float32)
        for first in range(0, len(tokens), CHUNK_ROWS):
            rows = tokens[first : first + CHUNK_ROWS]
            result[first : first + len(rows)] = self._pipeline.run(rows, first, wanted=range(len(rows)))
        return result

    def close(self) -> None:
        """Drops the blocks."""
        self._pipeline.close()


def converted(checkpoint: Path, side: Format, folder: Path) -> Path:
    """Returns a block folder that `blockrelay convert` writes below `folder`, over an older one. Raises Failed."""
    out = folder / side.title.replace(", ", "-").replace(" ", "-")
    command = [str(BLOCKRELAY), "convert", str(checkpoint), str(out), "--precision", side.precision, "--force"]
    calibration = ["--calibrate", str(CALIBRATION)] if side.calibrated else []
    run([*command, *calibration], log=folder / f"{out.name}.log", capture=False)
    return out


class LlamaCppSide:
    """llama.cpp in a process of its environment, which writes the logits of each window into a file."""

    def __init__(self, gguf: Path, kind: str, folder: Path, *, threads: int) -> None:
        """Installs the environment if needed, and loads the model `gguf` as `kind`. Raises Failed."""
        if error := install(_PEER, ENVS):
            raise Failed(error)
        folder.mkdir(parents=True, exist_ok=True)
        self._log, self._file = folder / "llamacpp.log", folder / "window.npy"
        command = [str(python_of(_PEER, ENVS)), str(_SCRIPT), str(gguf), str(folder)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--kind", kind, "--threads", str(threads), "--tokens", str(WINDOW)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._answer()
        self.bytes = (folder / f"{kind}.gguf" if kind else gguf).stat().st_size

    def logits(self, tokens: Sequence[int]) -> Logits:
        """Returns the logits behind each token (see `Side`)."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(list(tokens)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Failed(last_line(self._log.read_text(errors="replace"))) from None
        self._answer()
        result = np.load(self._file)
        self._file.unlink()
        if result.shape[0] != len(tokens) or not np.isfinite(result).all():
            raise Failed(f"logits {result.shape} for {len(tokens)} tokens, or not finite")
        return result

    def close(self) -> None:
        """Ends the process: it stops at the end of its input."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _answer(self) -> None:
        """Waits for the line that ends each step of the process. Raises Failed if it ends instead."""
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            self._process.wait()
            raise Failed(last_line(self._log.read_text(errors="replace")))
