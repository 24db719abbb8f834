"""Blocks of a model that was split compute what the whole computes: prefill, single steps and a chunk, for two rows."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from blockrelay_worker.offline.onnx_blocks.check import run as check
from blockrelay_worker.offline.onnx_blocks.splitting.split import run
from tests.support.models.genai_decoder import genai_decoder
from tests.support.models.reference_blocks import ReferenceModel, reference_block
from tests.support.models.run_onnx import blocks, requests, whole
from tests.support.models.whole_decoders import SMALL, dynamo_decoder, in_int8, optimum_decoder, saved

pytestmark = pytest.mark.onnx_blocks

MODELS: dict[str, Callable[[], ModelProto]] = {
    "optimum": lambda: optimum_decoder(float32=True),
    "dynamo": dynamo_decoder,
    "int8": lambda: in_int8(optimum_decoder(float32=True)),
    "genai": genai_decoder,
    "genai in int4": lambda: genai_decoder(int4=True),
}
STEPS = (7, 1, 1, 4, 1)
#: The attention operator of genai's models takes several new tokens only where there are none before them.
WITHOUT_CHUNK = (7, 1, 1, 1)


def steps_of(name: str) -> Sequence[int]:
    return WITHOUT_CHUNK if name.startswith("genai") else STEPS


def split(model: ModelProto, folder: Path, *options: str, external: bool) -> tuple[Path, Path]:
    """The file of the whole, and the folder of its blocks."""
    path, out = saved(model, folder / "model" / "model.onnx", external=external), folder / "blocks"
    assert run([*options, str(path), str(out)]) == 0
    return path, out


@pytest.mark.parametrize("options", [[], ["--copy-weights"]])
@pytest.mark.parametrize("external", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_bit_equal(tmp_path: Path, name: str, external: bool, options: list[str]) -> None:
    path, out = split(MODELS[name](), tmp_path, *options, external=external)
    one, several = whole(path), blocks(out)
    assert len(several.sessions) == SMALL.layers + 1
    for request in requests(steps_of(name), batch=2, vocabulary=SMALL.vocabulary):
        expected, found = one.step(request), several.step(request)
        assert expected["logits"].tobytes() == found["logits"].tobytes()
        caches = zip(one.kept.values(), cache_order(one.kept, several.kept), strict=True)
        assert all(known.tobytes() == other.tobytes() for known, other in caches)


def cache_order(names: dict[str, Any], kept: dict[str, Any]) -> Sequence[Any]:
    """What is kept under the names that blocks have for the same."""
    return [kept[name] if name in kept else kept[contract_name(name)] for name in names]


def contract_name(name: str) -> str:
    """Of `past_3_1`."""
    _, layer, half = name.split("_")
    return f"past_key_values.{layer}.{('key', 'value')[int(half)]}"


@pytest.mark.parametrize("past", ["0", "3"])
@pytest.mark.parametrize("name", MODELS)
def test_the_check_passes_what_was_split(tmp_path: Path, name: str, past: str) -> None:
    _, out = split(MODELS[name](), tmp_path, external=True)
    assert check(["--device", "cpu", "--batch", "2", "--sequence", "1", "--past", past, "--", str(out)]) == 0


@pytest.mark.parametrize("optimised", [False, True])
def test_float16_is_within_tolerance_and_tokens_are_equal(tmp_path: Path, optimised: bool) -> None:
    """The CPU provider computes float16 in float32 and rounds where a tensor leaves the graph: at borders too."""
    path, out = split(optimum_decoder(), tmp_path, external=False)
    one, several = whole(path, optimised=optimised), blocks(out, optimised=optimised)
    compared = 0
    for request in requests(STEPS, batch=2, vocabulary=SMALL.vocabulary):
        expected = one.step(request)["logits"].astype(np.float32)
        found = several.step(request)["logits"].astype(np.float32)
        assert np.abs(expected - found).max() <= 0.01 * np.abs(expected).max()
        best = np.sort(expected, axis=-1)
        clear = best[..., -1] - best[..., -2] > 0.1
        compared += int(clear.sum())
        assert (expected.argmax(-1) == found.argmax(-1))[clear].all()
    assert compared > 10


def test_the_blocks_of_an_optimum_export_are_the_reference_blocks(tmp_path: Path) -> None:
    """33 files of 32 layers, with the inputs and outputs of the contract, and the nodes that the whole was made of."""
    model = ReferenceModel()
    _, out = split(optimum_decoder(model), tmp_path, external=False)
    assert len(list(out.iterdir())) == 33
    for index in range(1, 34):
        known, found = reference_block(model, index).graph, onnx.load_model(out / f"block_{index}.onnx").graph
        for one, other in ((known.input, found.input), (known.output, found.output)):
            assert {value.name: value.type.tensor_type.elem_type for value in one} == {
                value.name: value.type.tensor_type.elem_type for value in other
            }
        assert sorted(node.name for node in known.node) == sorted(node.name for node in found.node)
        assert {tensor.name for tensor in known.initializer} == {tensor.name for tensor in found.initializer}


def test_what_is_quantised_for_a_product_is_not_handed_on(tmp_path: Path) -> None:
    _, out = split(MODELS["int8"](), tmp_path, external=False)
    (value,) = onnx.load_model(out / f"block_{SMALL.layers + 1}.onnx").graph.input
    assert value.name == f"/model/layers.{SMALL.layers - 1}/Add_1_output_0"
    assert value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT


def test_lengths_come_from_each_blocks_own_past(tmp_path: Path) -> None:
    """The whole asks the first layer's past for the batch; no later block takes that past, or the batch from others."""
    _, out = split(dynamo_decoder(), tmp_path, external=False)
    for index in range(2, SMALL.layers + 1):
        graph = onnx.load_model(out / f"block_{index}.onnx").graph
        pasts = [value.name for value in graph.input if value.name.startswith("past")]
        assert pasts == [f"past_key_values.{index - 1}.{half}" for half in ("key", "value")]
        assert [node.input[0] for node in graph.node if node.op_type == "Shape"] == [f"past_key_values.{index - 1}.key"]


@pytest.mark.parametrize("int4", [False, True])
def test_blocks_say_how_long_vectors_of_caches_are(tmp_path: Path, int4: bool) -> None:
    """The whole gives that dimension a name alone."""
    _, out = split(genai_decoder(int4=int4), tmp_path, external=False)
    for index in range(1, SMALL.layers + 1):
        graph = onnx.load_model(out / f"block_{index}.onnx").graph
        caches = [value for value in (*graph.input, *graph.output) if value.name.startswith(("past", "present"))]
        assert [value.type.tensor_type.shape.dim[3].dim_value for value in caches] == [SMALL.head_dim] * 4


def test_blocks_meet_in_two_tensors_where_norms_add(tmp_path: Path) -> None:
    _, out = split(genai_decoder(), tmp_path, external=False)
    graph = onnx.load_model(out / f"block_{SMALL.layers + 1}.onnx").graph
    last = f"/model/layers.{SMALL.layers - 1}"
    assert {value.name for value in graph.input} == {
        f"{last}/mlp/down_proj/MatMul/output_0",
        f"{last}/post_attention_layernorm/output_3",
    }
    assert [node.op_type for node in graph.node] == ["SkipSimplifiedLayerNormalization", "MatMul"]
