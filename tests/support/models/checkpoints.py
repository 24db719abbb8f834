"""Random checkpoints in the Hugging Face layout, made with numpy and tokenizers only.

    write_checkpoint(path, seed=1)                                      # a four-layer Llama with a tokenizer
    write_checkpoint(path, seed=1, family="qwen2", dtype="bfloat16", shards=3, tie_word_embeddings=True)

The same arguments give the same bytes on every machine: weights come from the raw stream of PCG64 (stable across NumPy
versions) through exact float32 arithmetic, so a golden needs to store only its arguments.
"""

import functools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
StorageType = Literal["float32", "float16", "bfloat16", "float64", "int64", "bool"]

BOS_ID = 1
EOS_ID = 2
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_SAFETENSORS_TYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float64": "F64",
    "int64": "I64",
    "bool": "BOOL",
}


def write_checkpoint(
    path: Path,
    *,
    seed: int,
    family: Family = "llama",
    hidden_size: int = 64,
    num_hidden_layers: int = 4,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    head_dim: int | None = None,
    intermediate_size: int = 128,
    vocab_size: int = 512,
    max_position_embeddings: int = 512,
    rms_norm_eps: float = 1e-5,
    tie_word_embeddings: bool = False,
    rope_theta: float = 10000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    dtype: StorageType = "float32",
    shards: int = 1,
    new_spelling: bool = False,
    eos_ids: tuple[int, ...] = (EOS_ID,),
    tokenizer: bool = True,
    head_gain: float = 4.0,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint into `path` (made if absent) and return it.

    `new_spelling` writes `rope_parameters` and `dtype` instead of `rope_theta`, `rope_scaling` and `torch_dtype`.
    `head_gain` is the standard deviation of the logits: the larger, the clearer the argmax. `config` overrides or adds
    fields of config.json (and nothing else); a value of None is written as null. With a tokenizer, vocab_size must be
    at least 260; ids 0, 1, 2 are <unk>, <s>, </s>.
    """
    path.mkdir(parents=True, exist_ok=True)
    head_dim_or_default = head_dim or hidden_size // num_attention_heads
    settings: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "intermediate_size": intermediate_size,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": rms_norm_eps,
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": BOS_ID,
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else list(eos_ids),
    }
    if head_dim is not None or family == "qwen3":
        settings["head_dim"] = head_dim_or_default
    if family == "mistral":
        settings["sliding_window"] = None
    if new_spelling:
        scaling = {"rope_type": "default", **(rope_scaling or {})}
        settings |= {"dtype": dtype, "rope_parameters": {**scaling, "rope_theta": rope_theta}}
    else:
        settings |= {"torch_dtype": dtype, "rope_theta": rope_theta, "rope_scaling": rope_scaling}
    settings |= config or {}
    (path / "config.json").write_text(json.dumps(settings, indent=1))
    generation = {"bos_token_id": BOS_ID, "eos_token_id": list(eos_ids), "do_sample": False}
    (path / "generation_config.json").write_text(json.dumps(generation, indent=1))
    shapes = tensor_shapes(
        family=family,
        hidden=hidden_size,
        layers=num_hidden_layers,
        query=num_attention_heads * head_dim_or_default,
        key=num_key_value_heads * head_dim_or_default,
        head_dim=head_dim_or_default,
        intermediate=intermediate_size,
        vocab=vocab_size,
        tied=tie_word_embeddings,
    )
    _write_weights(path, _weights(shapes, seed, head_gain, tie_word_embeddings), dtype, shards)
    if tokenizer:
        write_tokenizer(path, vocab_size=vocab_size)
    return path


def write_tokenizer(path: Path, *, vocab_size: int) -> None:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens, with its config and a chat template."""
    (path / "tokenizer.json").write_text(_tokenizer_json(vocab_size))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": CHAT_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def write_safetensors(path: Path, tensors: Mapping[str, tuple[StorageType, NDArray[Any]]]) -> None:
    """Write a safetensors file. bfloat16 arrays are uint16 holding the upper half of a float32."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, array) in tensors.items():
        header[name] = {
            "dtype": _SAFETENSORS_TYPES[dtype],
            "shape": array.shape,
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in tensors.values():
            file.write(array.tobytes())


def stored(weights: NDArray[np.float32], dtype: StorageType) -> NDArray[Any]:
    """float32 weights as they lie in a file of `dtype`, rounded to even."""
    if dtype == "bfloat16":
        bits = weights.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return weights.astype(dtype)


def tensor_shapes(
    *,
    family: Family,
    hidden: int,
    layers: int,
    query: int,
    key: int,
    head_dim: int,
    intermediate: int,
    vocab: int,
    tied: bool,
) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a checkpoint; `query` and `key` are heads times head_dim."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        for name, columns in (("q", query), ("k", key), ("v", key)):
            shapes[f"{attention}{name}_proj.weight"] = (columns, hidden)
            if family == "qwen2":
                shapes[f"{attention}{name}_proj.bias"] = (columns,)
        if family == "qwen3":
            shapes[f"{attention}q_norm.weight"] = (head_dim,)
            shapes[f"{attention}k_norm.weight"] = (head_dim,)
        shapes[f"{attention}o_proj.weight"] = (hidden, query)
        shapes[f"{mlp}gate_proj.weight"] = (intermediate, hidden)
        shapes[f"{mlp}up_proj.weight"] = (intermediate, hidden)
        shapes[f"{mlp}down_proj.weight"] = (hidden, intermediate)
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"model.layers.{layer}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _weights(
    shapes: Mapping[str, tuple[int, ...]], seed: int, head_gain: float, tied: bool
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Name and values, uniform with a spread that keeps rows at about unit size through any number of layers."""
    source = np.random.PCG64(seed)
    # A tied embedding is kept small and the final norm large instead: else every token predicts itself.
    embedding_deviation = 0.1 if tied else 1.0
    for name, shape in shapes.items():
        count = math.prod(shape)
        raw = source.random_raw((count + 1) // 2).astype("<u8").view("<u4")[:count]
        unit = (raw >> 8).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)  # exact, in [-1, 1)
        if name.endswith("norm.weight"):
            values = np.float32(1.0) + np.float32(0.25) * unit
            if tied and name == "model.norm.weight":
                values *= np.float32(head_gain / (embedding_deviation * math.sqrt(shape[0])))
        elif name.endswith(".bias"):
            values = np.float32(0.5) * unit
        else:
            gain = head_gain if name == "lm_head.weight" else 1.0
            deviation = embedding_deviation if "embed" in name else gain / math.sqrt(shape[1])
            values = np.float32(deviation * math.sqrt(3.0)) * unit
        yield name, values.reshape(shape)


def _write_weights(
    path: Path, weights: Iterator[tuple[str, NDArray[np.float32]]], dtype: StorageType, shards: int
) -> None:
    if shards == 1:
        write_safetensors(path / "model.safetensors", {n: (dtype, stored(w, dtype)) for n, w in weights})
        return
    every = list(weights)
    index: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = every[shard::shards]
        write_safetensors(path / name, {n: (dtype, stored(w, dtype)) for n, w in part})
        index |= dict.fromkeys((n for n, _ in part), name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


@functools.cache
def _tokenizer_json(vocab_size: int) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, 2000),
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_ID)])
    return tokenizer.to_str()


_TEXT = """\
Once upon a time there was a small lighthouse on a rock in the sea. Every evening the keeper climbed the stairs.
Every evening she lit the lamp, and every morning she put it out again and wrote one line into her book.
Tom has a red ball. Anna has two apples. Tom gives the ball to Anna. Now Anna has the ball and two apples.
How many apples are left? Who has the ball? Where is the dog? The dog is in the garden, behind the old tree.
The weather was fine on Monday, cloudy on Tuesday, and on Wednesday it rained until the streets were rivers.
A machine that adds numbers can be built from wheels; a machine that remembers needs something that stays.
Für Elise, café, naïve, 日本語, Ελληνικά, emoji 🙂 and numbers 0123456789 are part of every honest test.
{"name": "value", "list": [1, 2, 3], "nested": {"key": null}}
def add(left, right): return left + right
The quick brown fox jumps over the lazy dog, and the lazy dog does not mind at all.
"""
