"""Writes a Llama model from a GGUF file as a Hugging Face folder, in float32."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from bench.quality.gguf_model import GgufModel, Tensor
from bench.quality.tokenizer import tokenizer_of
from blockrelay.errors import UsageError

#: GGUF's name of a tensor -> Hugging Face's.
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
#: The same of a layer's tensors.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OF_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def write_checkpoint(model: GgufModel, out: Path) -> None:
    """Writes config, weights and tokenizer into the folder `out`.

    Raises UsageError for a model that is not in Llama's form or has another kind of tokenizer than SmolLM2.
    """
    config = config_of(model.metadata, tied="output.weight" not in model.names())
    definition, about = tokenizer_of(model.metadata)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.tensors():
        count = heads.get(name.split(".")[-2])
        tensors[name_of(name)] = tensor if count is None else halves_apart(tensor, count)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=1))
    (out / "tokenizer.json").write_text(definition)
    (out / "tokenizer_config.json").write_text(json.dumps(about, indent=1))


def config_of(metadata: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """Returns the content of config.json; `tied`: the head has the weights of the embedding."""
    family = metadata["general.architecture"]
    if family != "llama":
        raise UsageError(f"the GGUF file holds a model of {family}, not of llama")
    heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": metadata["llama.embedding_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.embedding_length"] // heads,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "vocab_size": metadata["llama.vocab_size"],
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": _decimal(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _decimal(metadata["llama.rope.freq_base"]),
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
    }


def name_of(name: str) -> str:
    """Returns Hugging Face's name of a tensor, from GGUF's. Raises UsageError for one that Llama does not have."""
    if name in TOP:
        return TOP[name]
    match = _OF_LAYER.fullmatch(name)
    if match is None or match[2] not in LAYER:
        raise UsageError(f"the GGUF file holds {name}, which a model of llama does not have")
    return f"model.layers.{match[1]}.{LAYER[match[2]]}.weight"


def halves_apart(matrix: Tensor, heads: int) -> Tensor:
    """Returns a matrix of query or key rows in Hugging Face's order.

    The rotation turns pairs of rows of a head. GGUF has the two of a pair side by side, Hugging Face has them half a
    head apart.
    """
    rows, columns = matrix.shape
    pairs = matrix.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _decimal(value: float) -> float:
    """Returns the shortest decimal that is this value in float32: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))
