"""The folder that tests take for one that people own is a Llama, and its wiring is all that running it needs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from blockrelay.onnx_blocks.wiring import FromPast, Wiring
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider
from blockrelay_worker.offline.onnx_blocks.folder import open_onnx_folder
from tests.support.models.reference_blocks import ReferenceModel

#: Of a row's length: float16 rounds to 1 part in 2048, over three layers.
WITHIN = 0.005
Array = NDArray[Any]
MODEL = ReferenceModel(layers=3)


class Session:
    """Steps of a session through all blocks, by the wiring alone."""

    def __init__(self, folder: Path) -> None:
        opened = open_onnx_folder(folder)
        self.wiring: Wiring = opened.wiring
        self.blocks: list[ort.InferenceSession] = [
            CpuProvider().mixed_session(file.path.read_bytes(), folder) for file in opened.files
        ]
        self.past: dict[Any, Array] = {}

    def step(self, ids: Array, mask: Array, places: Array) -> Array:
        """Logits of the new tokens [B, S, vocabulary], float64."""
        values: dict[str, Array] = {"input_ids": ids, "attention_mask": mask, "position_ids": places}
        for session, signature, sources in zip(self.blocks, self.wiring.blocks, self.wiring.sources, strict=True):
            feeds: dict[str, Array] = {}
            for name, source in sources.items():
                feeds[name] = self._past(source, len(ids)) if isinstance(source, FromPast) else values[name]
            names = [tensor.name for tensor in signature.outputs]
            values.update(zip(names, map(np.asarray, session.run(names, feeds)), strict=True))
        self.past = {slot: values[present.name] for slot, present in self.wiring.presents.items()}
        return values["logits"].astype(np.float64)

    def _past(self, source: FromPast, batch: int) -> Array:
        return self.past.get(source.slot, np.zeros((batch, MODEL.kv_heads, 0, MODEL.head_dim), np.float16))


def whole(folder: Path, ids: Array) -> Array:
    """All tokens in one step."""
    batch, length = ids.shape
    return Session(folder).step(ids, np.ones_like(ids), np.tile(np.arange(length), (batch, 1)))


def furthest(found: Array, right: Array) -> float:
    """The error of the worst row, as a part of its length."""
    error = np.linalg.norm(found - right, axis=-1) / np.linalg.norm(right, axis=-1)
    return float(error.max())


def tokens(batch: int, length: int) -> Array:
    return np.random.default_rng(7).integers(0, MODEL.vocabulary, (batch, length))


def test_steps_with_a_past_give_what_one_pass_gives(blocks: Path) -> None:
    ids = tokens(2, 12)
    session, parts = Session(blocks), list[Array]()
    for first, end in ((0, 7), (7, 8), (8, 11), (11, 12)):
        mask = np.ones((2, end), np.int64)
        parts.append(session.step(ids[:, first:end], mask, np.tile(np.arange(first, end), (2, 1))))
    assert furthest(np.concatenate(parts, axis=1), whole(blocks, ids)) <= WITHIN


def test_padding_on_the_left_changes_nothing(blocks: Path) -> None:
    ids = tokens(2, 9)
    mask = np.ones_like(ids)
    mask[1, :4] = 0
    places = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    padded = Session(blocks).step(ids, mask, places)
    assert furthest(padded[1, 4:], whole(blocks, ids[1:, 4:])[0]) <= WITHIN


def test_it_is_the_llama_of_its_weights(blocks: Path) -> None:
    ids = tokens(1, 9)
    assert furthest(whole(blocks, ids)[0], llama(ids[0])) <= WITHIN


def test_weights_beside_the_graph_compute_the_same(blocks: Path, with_weights_beside: Path) -> None:
    ids = tokens(1, 5)
    assert np.array_equal(whole(blocks, ids), whole(with_weights_beside, ids))


def llama(ids: Array) -> Array:
    """Logits of a prompt by the formulas, in float64 [length, vocabulary]."""
    weights: Mapping[str, Array] = {
        name: value.astype(np.float64)
        for block in range(1, MODEL.layers + 2)
        for name, value in MODEL.weights(block).items()
    }
    length, each = len(ids), MODEL.heads // MODEL.kv_heads
    angles = np.outer(np.arange(length), MODEL.frequencies().astype(np.float64))
    cos, sin = (np.concatenate([part, part], axis=-1)[:, None] for part in (np.cos(angles), np.sin(angles)))

    def norm(x: Array, weight: str) -> Array:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + MODEL.epsilon) * weights[weight]

    def heads(x: Array, weight: str, *, rotate: bool) -> Array:
        split = (x @ weights[weight]).reshape(length, -1, MODEL.head_dim)
        low, high = np.split(split, 2, axis=-1)
        return split * cos + np.concatenate([-high, low], axis=-1) * sin if rotate else split

    hidden = weights["model.embed_tokens.weight"][ids]
    for layer in range(MODEL.layers):
        at = f"model.layers.{layer}"
        x = norm(hidden, f"{at}.input_layernorm.weight")
        queries = heads(x, f"{at}.self_attn.q_proj.weight", rotate=True)
        keys = np.repeat(heads(x, f"{at}.self_attn.k_proj.weight", rotate=True), each, axis=1)
        values = np.repeat(heads(x, f"{at}.self_attn.v_proj.weight", rotate=False), each, axis=1)
        scores = np.einsum("qhd,khd->hqk", queries, keys) * MODEL.head_dim**-0.5
        scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", shares, values).reshape(length, -1)
        hidden = hidden + mixed @ weights[f"{at}.self_attn.o_proj.weight"]
        x = norm(hidden, f"{at}.post_attention_layernorm.weight")
        gate = x @ weights[f"{at}.mlp.gate_proj.weight"]
        up = x @ weights[f"{at}.mlp.up_proj.weight"]
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{at}.mlp.down_proj.weight"]
    return norm(hidden, "model.norm.weight") @ weights["lm_head.weight"]
