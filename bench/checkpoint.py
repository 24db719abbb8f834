"""Makes a random Llama checkpoint of a known shape in Hugging Face's layout: `python bench/checkpoint.py llama1b OUT`.

Speed does not depend on the values of weights, so none have to be downloaded. The tokenizer is trained on this
repository's own text. There is one file per layer, so that 16 GB of weights are never in memory.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[1]
MAX_TOKENS_OF_VOCABULARY = 8000
#: hidden, layers, heads, kv heads, head size, MLP, vocabulary. llama8b and llama2-7b are the exact shapes of
#: Llama-3.1-8B and Llama-2-7B; llama1b-128k has the former's vocabulary, and llama1b-16k four times the context.
SHAPES = {
    "tiny": (128, 2, 4, 2, 32, 256, 512),
    "llama75m": (768, 8, 12, 4, 64, 2048, 16000),
    "llama160m": (768, 12, 12, 4, 64, 2048, 32000),
    "llama1b": (2048, 16, 32, 8, 64, 8192, 32000),
    "llama1b-128k": (2048, 16, 32, 8, 64, 8192, 128256),
    "llama1b-16k": (2048, 16, 32, 8, 64, 8192, 32000),
    "llama2-7b": (4096, 32, 32, 32, 128, 11008, 32000),
    "llama8b": (4096, 32, 32, 8, 128, 14336, 128256),
}
Normal = Callable[..., NDArray[np.float16]]
#: The number of weights that `quick` checkpoints draw and repeat; odd, so that rows of a matrix differ.
_POOL = (1 << 22) + 1


def config_of(shape: str) -> dict[str, Any]:
    """Returns the content of config.json for a shape."""
    hidden, layers, heads, kv_heads, head_dim, mlp, vocabulary = SHAPES[shape]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": mlp,
        "vocab_size": vocabulary,
        "max_position_embeddings": 16384 if shape == "llama1b-16k" else 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def write_checkpoint(shape: str, out: Path, *, quick: bool = False) -> None:
    """Writes the checkpoint into `out`, whole or not at all.

    `quick`: within seconds, with weights that repeat, and without a tokenizer.
    """
    draft = out.with_name(out.name + ".draft")
    draft.mkdir(parents=True, exist_ok=True)
    config = config_of(shape)
    (draft / "config.json").write_text(json.dumps(config, indent=1))
    if not quick:
        _write_tokenizer(draft, config["vocab_size"])
    _write_weights(draft, config, _repeated() if quick else _drawn())
    draft.rename(out)


def _drawn() -> Normal:
    """Returns a function that draws float16 matrices with a standard deviation of 0.02."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> NDArray[np.float16]:
        return (rng.standard_normal(shape, np.float32) * 0.02).astype(np.float16)

    return normal


def _repeated() -> Normal:
    """Returns a function that fills matrices from a pool of _POOL weights."""
    drawn, rng = _drawn(), np.random.default_rng(1)
    pool = drawn(_POOL)
    return lambda *shape: np.resize(np.roll(pool, int(rng.integers(_POOL))), shape)


def _write_weights(out: Path, config: dict[str, Any], normal: Normal) -> None:
    """Writes all tensors, one file per layer, and their index."""
    hidden, mlp, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    index: dict[str, str] = {}

    def save(tensors: dict[str, NDArray[np.float16]]) -> None:
        name = f"model-{len(set(index.values())):05d}.safetensors"
        save_file(tensors, out / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))

    ones = np.ones(hidden, np.float16)
    save({"model.embed_tokens.weight": normal(config["vocab_size"], hidden)})
    for layer in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }
        tensors = {name: normal(*shape) for name, shape in shapes.items()}
        tensors |= {"input_layernorm": ones, "post_attention_layernorm": ones}
        save({f"model.layers.{layer}.{name}.weight": tensor for name, tensor in tensors.items()})
    save({"model.norm.weight": ones, "lm_head.weight": normal(config["vocab_size"], hidden)})
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _write_tokenizer(out: Path, vocabulary: int) -> None:
    """Trains a BPE tokenizer on this repository's text and writes it."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(MAX_TOKENS_OF_VOCABULARY, vocabulary),
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [ROOT / "README.md", *sorted((ROOT / "services").rglob("*.py")), *sorted((ROOT / "shared").rglob("*.py"))]
    tokenizer.train_from_iterator((text.read_text() for text in texts), trainer)
    tokenizer.save(str(out / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(about, indent=1))


def main() -> int:
    """Writes a checkpoint and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    write_checkpoint(options.shape, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
