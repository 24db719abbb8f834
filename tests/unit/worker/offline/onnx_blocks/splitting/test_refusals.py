"""A model that cannot be split: exit code 2, one line that names file and tensor, and nothing written."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper

from blockrelay_worker.offline.onnx_blocks.splitting.split import run
from tests.support.models.altered_blocks import Change, altered, copied, cut, externalised, value
from tests.support.models.genai_decoder import genai_decoder
from tests.support.models.reference_blocks import ReferenceModel
from tests.support.models.whole_decoders import dynamo_decoder, optimum_decoder, saved


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in it, weights beside it."""
    return saved(optimum_decoder(float32=True), tmp_path_factory.mktemp("whole") / "model.onnx", external=True).parent


def changed(alter: Callable[[ModelProto], object]) -> Change:
    return altered("model.onnx", alter)


def renamed(names: dict[str, str]) -> Change:
    """Inputs of the graph, and wherever they are read."""

    def alter(model: ModelProto) -> None:
        for one in model.graph.input:
            one.name = names.get(one.name, one.name)
        for node in model.graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]

    return changed(alter)


def maker(model: ModelProto, name: str) -> NodeProto:
    return next(node for node in model.graph.node if name in node.output)


def crossed(model: ModelProto) -> None:
    """Layers 1 and 2 read each other's keys."""
    for one, other in ((1, 2), (2, 1)):
        maker(model, f"present.{one}.key").input[0] = f"past_key_values.{other}.key"


def forgetful(model: ModelProto) -> None:
    """The keys of layer 1 are the new ones alone."""
    node = maker(model, "present.1.key")
    node.op_type = "Identity"
    node.input[:] = [node.input[1]]
    del node.attribute[:]


def without_output(name: str) -> Change:
    def alter(model: ModelProto) -> None:
        kept = [one for one in model.graph.output if one.name != name]
        del model.graph.output[:]
        model.graph.output.extend(kept)

    return changed(alter)


def cyclic(model: ModelProto) -> None:
    maker(model, "/model/layers.0/Add_output_0").input[0] = "/model/layers.1/Add_output_0"


def gapped(model: ModelProto) -> None:
    model.graph.node.remove(maker(model, "/model/layers.2/Add_output_0"))


def peeking(model: ModelProto) -> None:
    """Layer 1 reads the keys that layer 0 had before, in one node with its own."""
    maker(model, "present.1.key").input.append("past_key_values.0.key")


def without_pasts(model: ModelProto) -> None:
    """A product of its own, and nothing else."""
    graph = model.graph
    del graph.node[:], graph.input[:], graph.output[:]
    graph.input.append(value("x", 1, 2))
    graph.output.append(value("y", 1, 2))
    graph.node.append(helper.make_node("Neg", ["x"], ["y"]))


def linked_out(folder: Path) -> None:
    (folder / "model.onnx_data").rename(folder.parent / "elsewhere.data")
    (folder / "model.onnx_data").symlink_to(folder.parent / "elsewhere.data")


REFUSED: dict[str, tuple[list[Change], list[str]]] = {
    "no ONNX": ([lambda folder: (folder / "model.onnx").write_bytes(b"GGUF" * 100) and None], ["not an ONNX file"]),
    "an empty file": ([cut("model.onnx", 0)], ["not an ONNX file with a graph"]),
    "a file that was cut off": ([cut("model.onnx", 0.5)], ["not an ONNX file, or a part of one"]),
    "no file": ([lambda folder: (folder / "model.onnx").unlink()], ["No such file"]),
    "weights in a folder above": (
        [changed(lambda model: inside_out(model, "../elsewhere"))],
        ["model.layers.", "outside the folder"],
    ),
    "weights behind a link": ([linked_out], ["'model.onnx_data' is a link out of the folder"]),
    "weights that are missing": ([lambda folder: (folder / "model.onnx_data").unlink()], ["is missing"]),
    "weights that were cut off": ([cut("model.onnx_data", 0.5)], ["altered or cut off"]),
    "no pasts": ([changed(without_pasts)], ["has no pasts", "past_key_values.0.key"]),
    "pasts without numbers": (
        [
            renamed(
                {
                    f"past_key_values.{i}.{half}": f"memory_{'x' * i}{half}"
                    for i in range(4)
                    for half in ("key", "value")
                }
            )
        ],
        ["memory_key", "no number of a layer"],
    ),
    "a layer is missing": (
        [renamed({f"past_key_values.2.{half}": f"past_key_values.7.{half}" for half in ("key", "value")})],
        ["past_key_values.7.value", "is of layer 7, and no input is the keys of layer 2"],
    ),
    "layers that do not follow each other": (
        [changed(crossed)],
        ["present.1.key", "the past of layer 2 is in it", "do not follow each other"],
    ),
    "a layer that reads another one's past": (
        [changed(peeking)],
        ["past_key_values.0.key", "is read by what makes present.1.key"],
    ),
    "a present without its past": (
        [changed(forgetful)],
        ["present.1.key", "is the keys of layer 1, and their past is not in it"],
    ),
    "a present of no past": (
        [renamed({"past_key_values.3.key": "past_key_values.2.key_cache"})],
        ["past_key_values.2.key_cache", "is the keys of layer 2 so far, and so is past_key_values.2.key"],
    ),
    "a past without its present": (
        [without_output("present.2.value")],
        ["past_key_values.2.value", "no output is its present"],
    ),
    "a cycle": ([changed(cyclic)], ["/model/layers.", "is in a cycle"]),
    "a gap": ([changed(gapped)], ["/model/layers.2/Add_output_0", "is made by no node"]),
    "no tokens": ([renamed({"input_ids": "tokens"})], ["has no input input_ids"]),
}


def inside_out(model: ModelProto, location: str) -> None:
    """A tensor that was inside claims to be elsewhere."""
    tensor = next(one for one in model.graph.initializer if one.name.startswith("model.layers."))
    tensor.ClearField("external_data")
    tensor.raw_data = bytes(4)
    externalised(model, location)


def refused(capsys: pytest.CaptureFixture[str], path: Path, out: Path, *options: str) -> str:
    """What stderr says: one line. Nothing else is said, and nothing is there that was not."""
    before = sorted(out.parent.rglob("*"))
    assert run([*options, str(path), str(out)]) == 2
    told, err = capsys.readouterr()
    assert told == "" and err.count("\n") == 1, err
    assert before == sorted(out.parent.rglob("*"))
    return err


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    changes, words = REFUSED[case]
    folder = copied(model, tmp_path / "copy", *changes)
    started = time.monotonic()
    said = refused(capsys, folder / "model.onnx", tmp_path / "out")
    assert time.monotonic() - started < 10
    for word in ["blockrelay: model.onnx: ", *words]:
        assert word in said


def test_a_graph_in_a_node_is_seen_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such as optimum's merged decoders: all layers are in both branches of one If."""
    whole = optimum_decoder(float32=True)
    graph = whole.graph
    inner = helper.make_graph(list(graph.node), "branch", [], list(graph.output))
    outputs = [
        f"{one.name}_" if one.name == "logits" else one.name.replace("present", "present_key_values")
        for one in inner.output
    ]
    node = helper.make_node("If", ["flag"], outputs, then_branch=inner, else_branch=inner)
    del graph.node[:]
    graph.node.append(node)
    graph.input.append(value("flag", TensorProto.BOOL))
    for one, name in zip(graph.output, outputs, strict=True):
        one.name = name
    path = saved(whole, tmp_path / "merged" / "model.onnx")
    assert "do not follow each other" in refused(capsys, path, tmp_path / "out")


def test_a_cache_that_nobody_can_tell_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = dynamo_decoder()
    whole.graph.node.append(helper.make_node("Neg", ["cat_2"], ["again"]))
    again = value("again", 1, "b", 2, "t", 16)
    whole.graph.output.append(again)
    path = saved(whole, tmp_path / "whole" / "model.onnx")
    assert "again: is the keys of layer 1, and so is cat_2" in refused(capsys, path, tmp_path / "out")


def test_any_bytes_are_a_refusal_or_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ReferenceModel(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, mlp=32, vocabulary=64)
    path = saved(genai_decoder(small), tmp_path / "whole" / "model.onnx", external=True)
    content, choose = path.read_bytes(), random.Random(1)
    codes: set[int] = set()
    for number in range(200):
        changed = bytearray(content)
        for _ in range(choose.choice((1, 1, 3))):
            changed[choose.randrange(len(changed))] = choose.choice((0, 1, 128, 255, choose.randrange(256)))
        path.write_bytes(changed)
        code = run([str(path), str(tmp_path / f"out{number}")])
        said = capsys.readouterr().err
        assert code == 0 or (code == 2 and said.count("\n") == 1), said
        codes.add(code)
    assert codes == {0, 2}


def test_a_place_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(genai_decoder(), tmp_path / "whole" / "model.onnx")
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("theirs")
    assert f"{out} exists and is not empty" in refused(capsys, path, out)
    assert f"{out / 'precious'} exists and is not a folder" in refused(capsys, path, out / "precious")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "not a folder" in refused(capsys, path, tmp_path / "link")


def test_weights_that_are_called_like_a_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(genai_decoder(), tmp_path / "whole" / "block_1", external=True)
    (path.parent / "block_1_data").rename(path.parent / "block_2.onnx")
    altered(path.name, lambda model: relocated(model, "block_2.onnx"))(path.parent)
    assert "'block_2.onnx', as a block is called" in refused(capsys, path, tmp_path / "out")


def relocated(model: ModelProto, location: str) -> None:
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
