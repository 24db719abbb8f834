"""Whole ONNX models and their blocks on ONNX Runtime's CPU provider, step by step beside each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tests.support.models.whole_decoders import SMALL

Arrays = dict[str, NDArray[Any]]
_DTYPES: Mapping[str, Any] = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


def session(path: Path, *, optimised: bool = False) -> ort.InferenceSession:
    """On one thread. Not `optimised`: every node is computed as it is in the file."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if not optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@dataclass(slots=True)
class Running:
    """Sessions that run one after another, each fed by what those before it gave, and what they keep of past steps.

    Caches are in the order of their inputs and outputs, which must be the same: so they need no names. `head_dim` is
    that of caches whose inputs do not tell it.
    """

    sessions: Sequence[ort.InferenceSession]
    head_dim: int = SMALL.head_dim
    kept: Arrays = field(default_factory=dict[str, NDArray[Any]])

    def step(self, request: Arrays) -> Arrays:
        """All outputs; what is no cache of the last session is `logits` too, whatever it is called."""
        found = dict(request)
        outputs: Arrays = {}
        for one in self.sessions:
            pasts = [value for value in one.get_inputs() if _is_cache(value)]
            presents = [value.name for value in one.get_outputs() if _is_cache(value)]
            batch = len(request["input_ids"])
            for value in pasts:
                size = value.shape[3] if isinstance(value.shape[3], int) else self.head_dim
                empty = np.zeros((batch, value.shape[1], 0, size), _DTYPES[value.type])
                found[value.name] = self.kept.get(value.name, empty)
            names = [value.name for value in one.get_outputs()]
            made: Any = one.run(names, {value.name: found[value.name] for value in one.get_inputs()})
            made = dict(zip(names, made, strict=True))
            found |= made
            outputs |= made
            self.kept |= {value.name: made[name] for value, name in zip(pasts, presents, strict=True)}
        (logits,) = [value.name for value in self.sessions[-1].get_outputs() if not _is_cache(value)]
        return outputs | {"logits": outputs[logits]}


def whole(path: Path, *, optimised: bool = False) -> Running:
    return Running([session(path, optimised=optimised)])


def blocks(folder: Path, *, optimised: bool = False) -> Running:
    count = len(list(folder.glob("block_*.onnx")))
    return Running([session(folder / f"block_{index}.onnx", optimised=optimised) for index in range(1, count + 1)])


def requests(steps: Sequence[int], *, batch: int, vocabulary: int, seed: int = 0) -> Sequence[Arrays]:
    """Made-up tokens, so many in each step."""
    random = np.random.default_rng(seed)
    found: list[Arrays] = []
    past = 0
    for new in steps:
        total = past + new
        found.append(
            {
                "input_ids": random.integers(0, vocabulary, (batch, new)),
                "attention_mask": np.ones((batch, total), np.int64),
                "position_ids": np.tile(np.arange(past, total), (batch, 1)),
            }
        )
        past = total
    return found


def _is_cache(value: Any) -> bool:
    return len(value.shape) == 4 and value.name.startswith(("past", "present", "cat_"))
