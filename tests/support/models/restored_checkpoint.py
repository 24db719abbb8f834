"""A float checkpoint out of a w8a8 block folder: a model that really predicts texts, for what measures perplexity.

    restore_checkpoint(BUNDLED_MODEL, path)

Its weights are q * scale, so that converting it to w8a8 again gives nearly the same numbers.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.block_folder.model import hadamard_size
from tests.support.models.checkpoints import write_safetensors
from tests.support.models.hadamard import hadamard


def restore_checkpoint(model: Path, path: Path) -> Path:
    """Write the checkpoint of a llama block folder into `path` (made) and return it."""
    folder = open_block_folder(model)
    assert (folder.model.family, folder.manifest.precision) == ("llama", "w8a8")
    path.mkdir(parents=True)
    shape = folder.model
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": _theta(folder),
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": shape.bos_id,
        "eos_token_id": list(shape.eos_ids),
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": shape.eos_token, "chat_template": folder.chat_template()})
    )
    assert folder.tokenizer_path is not None
    shutil.copy(folder.tokenizer_path, path / "tokenizer.json")
    tensors = {name: np.ascontiguousarray(values) for name, values in _tensors(folder).items()}
    write_safetensors(path / "model.safetensors", {name: ("float32", values) for name, values in tensors.items()})
    return path


def _theta(folder: BlockFolder) -> float:
    """The base of the rotation, from the angles of position 1: of pair i it is theta ** (-i / pairs)."""
    cos, sin = folder.rotary()
    pairs = cos.shape[1]
    return round(float(np.arctan2(sin[1, 1], cos[1, 1])) ** -pairs)


def _tensors(folder: BlockFolder) -> dict[str, NDArray[np.float32]]:
    shape, found = folder.model, dict[str, NDArray[np.float32]]()
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for index in range(1, shape.layers + 1):
        tensors, layer = folder.tensors(index), f"model.layers.{index - 1}."
        if index == 1:
            found["model.embed_tokens.weight"] = tensors["embedding"].astype(np.float32)
        q, k, v = np.split(_weights(tensors, "qkv"), [query, query + key])
        gate, up = np.split(_weights(tensors, "gate_up"), 2)
        found |= {f"{layer}self_attn.{name}_proj.weight": part for name, part in zip("qkv", (q, k, v), strict=True)}
        found[f"{layer}self_attn.o_proj.weight"] = _weights(tensors, "o")
        found |= {f"{layer}mlp.gate_proj.weight": gate, f"{layer}mlp.up_proj.weight": up}
        found[f"{layer}mlp.down_proj.weight"] = _down(folder, index)
        found[f"{layer}input_layernorm.weight"] = tensors["norm_attention"]
        found[f"{layer}post_attention_layernorm.weight"] = tensors["norm_mlp"]
    last = folder.tensors(shape.blocks)
    return found | {"model.norm.weight": last["norm_final"], "lm_head.weight": _weights(last, "head")}


def _down(folder: BlockFolder, index: int) -> NDArray[np.float32]:
    """[outputs, inputs], for inputs that no Hadamard matrix has multiplied."""
    weights = _weights(folder.tensors(index), "down")
    size = hadamard_size(folder.model, folder.manifest.precision_of(index))
    if not size:
        return weights
    return (weights.reshape(-1, size) @ hadamard(size)).reshape(weights.shape).astype(np.float32)


def _weights(tensors: dict[str, NDArray[Any]], kind: str) -> NDArray[np.float32]:
    """[outputs, inputs]."""
    return (tensors[f"{kind}.q"].astype(np.float32) * tensors[f"{kind}.scale"]).T
