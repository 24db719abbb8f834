"""Measures PyTorch in eager mode at the same shape: `python -m bench.gpu_kit.torch_llama FOLDER [--small]`.

The model is a minimal Llama: float16 on CUDA (float32 without it), a KV cache that is allocated in advance, greedy.
Weights are drawn on the device; speed does not depend on their values. FOLDER is ignored: the shape is that of
`bench.gpu_kit.shape`.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.checkpoint import SHAPES
from bench.gpu_kit.parts import NOT_HERE, tell
from bench.gpu_kit.shape import SHAPE, SMALL
from bench.gpu_kit.speed import NEW, PROMPT, REQUESTS, SMALL_NEW, WARM

EPSILON, THETA = 1e-6, 500000.0


@dataclass
class Llama:
    """A Llama of a shape of `bench.checkpoint` with random weights."""

    torch: Any
    shape: str
    device: str
    dtype: Any

    def __post_init__(self) -> None:
        hidden, layers, heads, kv_heads, head_dim, mlp, vocabulary = SHAPES[self.shape]
        self.layers, self.heads, self.kv_heads, self.head_dim = layers, heads, kv_heads, head_dim
        self.vocabulary = vocabulary

        def weight(*shape: int) -> Any:
            return self.torch.randn(shape, device=self.device, dtype=self.dtype) * 0.02

        self.embedding, self.head = weight(vocabulary, hidden), weight(vocabulary, hidden)
        self.norm = self.torch.ones(hidden, device=self.device, dtype=self.dtype)
        self.blocks = [
            {
                "query": weight(heads * head_dim, hidden), "key": weight(kv_heads * head_dim, hidden),
                "value": weight(kv_heads * head_dim, hidden), "out": weight(hidden, heads * head_dim),
                "gate": weight(mlp, hidden), "up": weight(mlp, hidden), "down": weight(hidden, mlp),
            }
            for _ in range(layers)
        ]  # fmt: skip

    def cache(self, requests: int, room: int) -> list[tuple[Any, Any]]:
        """Allocates keys and values of each layer, [requests, KV heads, room, head size], for `room` tokens."""
        shape = (requests, self.kv_heads, room, self.head_dim)
        zeros = self.torch.zeros
        return [
            (zeros(shape, device=self.device, dtype=self.dtype), zeros(shape, device=self.device, dtype=self.dtype))
            for _ in range(self.layers)
        ]

    def next(self, tokens: Any, past: int, cache: list[tuple[Any, Any]]) -> Any:
        """Computes `tokens` [requests, rows] at the positions from `past` on, and appends their keys and values.

        Returns the next token of each request, [requests, 1].
        """
        functional, rows = self.torch.nn.functional, tokens.shape[1]
        x = self.embedding[tokens]
        cos, sin = self._rotation(past, rows)
        for block, (keys, values) in zip(self.blocks, cache, strict=True):
            normed = self._normed(x)
            query, key, value = (
                functional.linear(normed, block[name]).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                for name in ("query", "key", "value")
            )
            keys[:, :, past : past + rows] = self._rotated(key, cos, sin)
            values[:, :, past : past + rows] = value
            attended = functional.scaled_dot_product_attention(
                self._rotated(query, cos, sin),
                keys[:, :, : past + rows],
                values[:, :, : past + rows],
                is_causal=rows > 1,
                enable_gqa=True,
            )
            x = x + functional.linear(attended.transpose(1, 2).flatten(2), block["out"])
            normed = self._normed(x)
            gate, up = functional.linear(normed, block["gate"]), functional.linear(normed, block["up"])
            x = x + functional.linear(functional.silu(gate) * up, block["down"])
        return functional.linear(self._normed(x[:, -1:]), self.head).argmax(-1)

    def _normed(self, x: Any) -> Any:
        return self.torch.nn.functional.rms_norm(x, (x.shape[-1],), self.norm, EPSILON)

    def _rotation(self, past: int, rows: int) -> tuple[Any, Any]:
        half = self.torch.arange(0, self.head_dim, 2, device=self.device) / self.head_dim
        positions = self.torch.arange(past, past + rows, device=self.device)
        angles = positions[:, None] * THETA**-half
        both = self.torch.cat([angles, angles], -1)
        return both.cos().to(self.dtype), both.sin().to(self.dtype)

    def _rotated(self, x: Any, cos: Any, sin: Any) -> Any:
        first, second = x.chunk(2, -1)
        return x * cos + self.torch.cat([-second, first], -1) * sin


def decoding(model: Llama, requests: int, new: int) -> dict[str, float]:
    """Measures `requests` greedy requests at once: tokens per second, and milliseconds of the median step.

    Each generates `new` tokens.
    """
    torch = model.torch

    def settled() -> float:
        if model.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    with torch.inference_mode():
        cache = model.cache(requests, PROMPT + new)
        tokens = torch.randint(3, model.vocabulary, (requests, PROMPT), device=model.device)
        token = model.next(tokens, 0, cache)
        times: list[float] = []
        for number in range(new - 1):
            began = settled()
            token = model.next(token, PROMPT + number, cache)
            token.tolist()  # a server needs the tokens on the CPU, too
            times.append(settled() - began)
    timed = times[min(WARM, len(times) // 2) :]
    return {"tok_s": round(requests * len(timed) / sum(timed), 1), "step_ms": round(median(timed) * 1000, 3)}


def main() -> int:
    """Measures, reports the figures, and returns the exit code: NOT_HERE without PyTorch or a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        print(f"no PyTorch: {error}")
        return NOT_HERE
    cuda = torch.cuda.is_available()
    if not (cuda or options.small):
        print("PyTorch sees no GPU")
        return NOT_HERE
    device, dtype = ("cuda", torch.float16) if cuda else ("cpu", torch.float32)
    model = Llama(torch, SMALL if options.small else SHAPE, device, dtype)
    figures: dict[str, Any] = {"torch": str(torch.__version__), "device": device, "dtype": str(dtype)}
    for requests in REQUESTS:
        figures[f"requests_{requests}"] = decoding(model, requests, SMALL_NEW if options.small else NEW)
        tell(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
