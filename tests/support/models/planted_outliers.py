"""A checkpoint with outlier channels, as large trained models have them, that computes the same as one without."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.support.models.checkpoints import write_safetensors

Tensors = dict[str, NDArray[np.float32]]


def read_float32(path: Path) -> Tensors:
    """The tensors of a float32 checkpoint of one file."""
    from safetensors.numpy import load_file

    return dict(load_file(path / "model.safetensors"))


def plant_outliers(path: Path, *, heads: int, kv_heads: int, factor: float) -> None:
    """Rewrite the float32 checkpoint at `path`: a few channels of every norm, value and up projection times `factor`,
    and the weights that read them divided by it. In exact arithmetic nothing else changes."""
    tensors = read_float32(path)
    layers = sum(name.endswith("input_layernorm.weight") for name in tensors)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."

        def scale(name: str, rows: NDArray[np.intp], prefix: str = prefix) -> None:
            tensors[prefix + name][rows] *= np.float32(factor)

        def unscale(name: str, columns: NDArray[np.intp], prefix: str = prefix) -> None:
            tensors[f"{prefix}{name}_proj.weight"][:, columns] /= np.float32(factor)

        _plant(tensors[f"{prefix}input_layernorm.weight"].size, scale, "input_layernorm.weight", unscale,
               [f"self_attn.{name}" for name in "qkv"], layer)  # fmt: skip
        _plant(tensors[f"{prefix}post_attention_layernorm.weight"].size, scale, "post_attention_layernorm.weight",
               unscale, ["mlp.gate", "mlp.up"], layer)  # fmt: skip
        _plant(
            tensors[f"{prefix}mlp.up_proj.weight"].shape[0], scale, "mlp.up_proj.weight", unscale, ["mlp.down"], layer
        )
        width = tensors[f"{prefix}self_attn.v_proj.weight"].shape[0]
        values = _chosen(width, layer)
        scale("self_attn.v_proj.weight", values)
        if f"{prefix}self_attn.v_proj.bias" in tensors:
            scale("self_attn.v_proj.bias", values)
        readers = np.arange(heads * (width // kv_heads)).reshape(kv_heads, heads // kv_heads, -1)
        own, position = np.divmod(values, width // kv_heads)
        unscale("self_attn.o", readers[own, :, position].reshape(-1))
    chosen = _chosen(tensors["model.norm.weight"].size, layers)
    tensors["model.norm.weight"][chosen] *= np.float32(factor)
    tensors["lm_head.weight"][:, chosen] /= np.float32(factor)
    write_safetensors(path / "model.safetensors", {name: ("float32", values) for name, values in tensors.items()})


def _plant(
    width: int,
    scale: Callable[[str, NDArray[np.intp]], None],
    made: str,
    unscale: Callable[[str, NDArray[np.intp]], None],
    read: list[str],
    layer: int,
) -> None:
    chosen = _chosen(width, layer)
    scale(made, chosen)
    for name in read:
        unscale(name, chosen)


def _chosen(width: int, layer: int) -> NDArray[np.intp]:
    """Three channels, others in every layer."""
    return (np.array([1, 1 + width // 3, 2 + width // 2]) + 5 * layer) % width
