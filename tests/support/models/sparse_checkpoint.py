"""A checkpoint of any size in no time: all weights are zero and the file is a hole, so it takes no disk either."""

import json
from pathlib import Path
from typing import Any

from tests.support.models.checkpoints import tensor_shapes


def write_sparse_checkpoint(
    path: Path, *, hidden_size: int, num_hidden_layers: int, intermediate_size: int, vocab_size: int
) -> int:
    """Write a bfloat16 Llama of this shape into `path`; returns the bytes of two layers and the embedding."""
    path.mkdir(parents=True)
    heads = hidden_size // 64
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": intermediate_size,
        "vocab_size": vocab_size,
        "max_position_embeddings": 64,
        "torch_dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config))
    shapes = tensor_shapes(
        family="llama",
        hidden=hidden_size,
        layers=num_hidden_layers,
        query=hidden_size,
        key=hidden_size,
        head_dim=64,
        intermediate=intermediate_size,
        vocab=vocab_size,
        tied=False,
    )
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    layer = 4 * hidden_size * hidden_size + 3 * hidden_size * intermediate_size + 2 * hidden_size
    return 2 * (2 * layer + vocab_size * hidden_size)
