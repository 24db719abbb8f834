"""The manifest: decoding returns what was encoded, and a field that makes no sense is refused by its name."""

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockrelay.block_folder.manifest import (
    ALIGNMENT,
    MANIFEST_NAME,
    ROTARY_NAME,
    BlockSpec,
    FileSpec,
    GenerationDefaults,
    Manifest,
    check_manifest,
    decode_manifest,
    is_inside,
    place_tensors,
)
from blockrelay.block_folder.model import (
    ITEM_BYTES,
    ModelConfig,
    Precision,
    TensorType,
    block_tensors,
    graph_kinds,
)
from blockrelay.block_folder.precisions import all_exact, parse_precisions
from blockrelay.errors import BlockFolderError
from blockrelay.settings import BUNDLED_MODEL

MODEL = ModelConfig(
    name="tiny",
    family="llama",
    hidden_size=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate_size=24,
    vocab_size=50,
    max_position=32,
    rms_norm_eps=1e-5,
    qkv_bias=False,
    qk_norm=False,
    eos_ids=(2, 3),
    bos_id=1,
    bos_token="<s>",
    eos_token=None,
)

#: One whose widths can be cut into groups.
GROUPED = replace(MODEL, hidden_size=64, intermediate_size=96)


def make_manifest(model: ModelConfig = MODEL, precision: str = "w8a8") -> Manifest:
    precisions = parse_precisions(precision, model.blocks)
    blocks: list[BlockSpec] = []
    files = {ROTARY_NAME: FileSpec(sha256="00", bytes=4 * model.max_position * model.head_dim)}
    for index in range(1, model.blocks + 1):
        tensors, size = place_tensors(block_tensors(model, precisions[index - 1], index))
        blocks.append(BlockSpec(index=index, file=f"blocks/{index}.bin", tensors=tensors, known_answer="ab"))
        files[blocks[-1].file] = FileSpec(sha256="11", bytes=size)
    graphs = {kind: f"graphs/{kind}.onnx" for kind in graph_kinds(precisions)}
    files |= {path: FileSpec(sha256=f"{kind}-hash", bytes=5) for kind, path in graphs.items()}
    return Manifest(
        model=model,
        generation=GenerationDefaults(temperature=0.6, top_p=0.9),
        precisions=precisions,
        basis="original",
        exact=all_exact(precisions),
        graphs=graphs,
        blocks=tuple(blocks),
        files=files,
    )


def test_a_manifest_reads_back_as_it_was_written() -> None:
    manifest = make_manifest()
    check_manifest(manifest)

    again = decode_manifest(manifest.encode())

    assert again == manifest
    assert again.encode() == manifest.encode()
    assert again.model_hash == manifest.model_hash
    assert [block.name for block in again.blocks] == ["block_1", "block_2", "block_3"]


def test_what_it_was_imported_from_is_written_where_it_was() -> None:
    assert b"imported_from" not in make_manifest().encode(), "other folders keep the hash that they had"
    manifest = replace(make_manifest(), imported_from="ab")
    assert decode_manifest(manifest.encode()) == manifest


def test_what_is_not_applied_is_written_where_there_is_something() -> None:
    assert b"ignored_defaults" not in make_manifest().encode(), "other folders keep the hash that they had"
    manifest = replace(make_manifest(), ignored_defaults={"repetition_penalty": 1.05, "suppress_tokens": [1]})
    assert decode_manifest(manifest.encode()) == manifest


def test_a_repetition_penalty_is_written_where_the_author_recommends_one() -> None:
    assert b"repetition_penalty" not in make_manifest().encode(), "other folders keep the hash that they had"
    generation = GenerationDefaults(temperature=0.6, repetition_penalty=1.05)
    manifest = replace(make_manifest(), generation=generation)
    assert decode_manifest(manifest.encode()) == manifest
    assert manifest.model_hash != replace(manifest, generation=GenerationDefaults(temperature=0.6)).model_hash


def test_a_folder_keeps_the_hash_that_its_release_gave_it() -> None:
    """The model that comes with the package was converted long ago: what came later is not in its manifest."""
    content = (BUNDLED_MODEL / MANIFEST_NAME).read_bytes()
    assert decode_manifest(content).encode() == content


def test_special_tokens_are_written_where_the_template_names_some() -> None:
    named = make_manifest(replace(MODEL, special_tokens=(("pad_token", "<pad>"),)))
    assert decode_manifest(named.encode()) == named
    assert named.model.template_tokens == {"bos_token": "<s>", "pad_token": "<pad>"}
    assert b"special_tokens" not in make_manifest().encode()


def test_the_model_hash_changes_with_anything_in_the_manifest_and_not_with_its_spacing() -> None:
    manifest = make_manifest()
    other_file = {**manifest.files, ROTARY_NAME: FileSpec(sha256="01", bytes=manifest.files[ROTARY_NAME].bytes)}
    variants = [
        manifest,
        replace(manifest, model=replace(MODEL, name="other")),
        replace(manifest, files=other_file),
        replace(manifest, exact=False),
        replace(manifest, generation=GenerationDefaults()),
        replace(manifest, imported_from="ab"),
    ]
    assert len({variant.model_hash for variant in variants}) == len(variants)
    spaced = json.dumps(json.loads(manifest.encode()), indent=7).encode()
    assert decode_manifest(spaced).model_hash == manifest.model_hash


def test_the_numerics_inputs_are_the_graphs_and_the_rotary_tables_and_nothing_else() -> None:
    inputs = make_manifest().numerics_inputs()
    assert inputs[ROTARY_NAME] == "00"
    assert inputs["graphs/qkv.u8u8.onnx"] == "qkv.u8u8-hash"
    assert len(inputs) == 1 + 2 * 5
    assert make_manifest(replace(MODEL, name="other")).numerics_inputs() == inputs


@pytest.mark.parametrize(
    ("model", "precision", "index", "expected"),
    [
        (MODEL, "w8a8", 1, {"embedding": ("float16", (50, 16)), "qkv.q": ("int8", (16, 64))}),
        (MODEL, "fp32", 1, {"embedding": ("float32", (50, 16)), "qkv.w": ("float32", (16, 64))}),
        (MODEL, "fp16", 1, {"embedding": ("float16", (50, 16)), "qkv.w": ("float16", (16, 64))}),
        (replace(MODEL, qkv_bias=True), "fp16", 2, {"qkv.bias": ("float32", (64,)), "norm_mlp": ("float32", (16,))}),
        (GROUPED, "w4a8", 1, {"embedding": ("float16", (50, 64)), "qkv.q4": ("uint8", (32, 64))}),
        (GROUPED, "w4a8", 2, {"down.gs": ("float16", (3, 64)), "down.gm": ("float16", (3, 64))}),
        (GROUPED, "w4a8", 3, {"norm_final": ("float32", (64,)), "head.q4": ("uint8", (32, 50))}),
        (MODEL, "w8a8", 2, {"gate_up.q": ("int8", (16, 48)), "down.q": ("int8", (24, 16)), "o.q": ("int8", (32, 16))}),
        (MODEL, "w8a8", 3, {"norm_final": ("float32", (16,)), "head.q": ("int8", (16, 50))}),
        (replace(MODEL, qkv_bias=True), "w8a8", 2, {"qkv.bias": ("float32", (64,))}),
        (replace(MODEL, qk_norm=True), "w8a8", 2, {"norm_q": ("float32", (8,)), "norm_k": ("float32", (8,))}),
    ],
)
def test_blocks_hold_the_tensors_of_their_part_of_the_model(
    model: ModelConfig, precision: Precision, index: int, expected: dict[str, Any]
) -> None:
    tensors = block_tensors(model, precision, index)
    assert expected.items() <= tensors.items()
    assert ("embedding" in tensors) == (index == 1)
    assert ("norm_final" in tensors) == (index == model.blocks)


def _set(*path: str | int, to: object) -> Callable[[dict[str, Any]], None]:
    def change(content: Any) -> None:
        for step in path[:-1]:
            content = content[step]
        content[path[-1]] = to

    return change


def _drop(*path: str | int) -> Callable[[dict[str, Any]], None]:
    def change(content: Any) -> None:
        for step in path[:-1]:
            content = content[step]
        del content[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("format", to=1), "format 1 was made by an older release (this one reads 2): convert the checkpoint"),
        (_set("format", to=3), "format 3 was made by a newer release: upgrade"),
        (_set("precision", to="int3"), "precision 'int3': 'int3' is none of w8a8, w4a8, fp32"),
        (_set("precision", to="w8a8,block_4=fp32"), "the model has block_1 to block_3"),
        (_set("precision", to="w8a8,block_1=w8a8"), "precision 'w8a8,block_1=w8a8' is written 'w8a8'"),
        (_set("precision", to="w8a8,block_3=fp32"), "graphs must be qkv"),
        (_set("model", "layers", to=10**15), f"has {10**15 + 1} blocks, not 3"),
        (_set("surprise", to=1), "unknown field 'surprise'"),
        (_set("model", "surprise", to=1), "model: unknown field 'surprise'"),
        (_drop("model", "heads"), "model: field 'heads' is missing"),
        (_set("model", "heads", to=True), "heads must be an integer"),
        (_set("model", "heads", to=3), "heads (3) must be a multiple of kv_heads (2)"),
        (_set("model", "head_dim", to=12), "head_dim (12) must be a multiple of 8, 256 at most"),
        (_set("model", "head_dim", to=264), "head_dim (264) must be a multiple of 8, 256 at most"),
        (_set("model", "layers", to=10**9), "has 1000000001 blocks, not 3"),
        (_set("model", "eos_ids", to=[50]), "eos_ids [50] are not all below vocab_size 50"),
        (_set("model", "rms_norm_eps", to="small"), "rms_norm_eps must be a finite number"),
        (_set("files", "../../etc/passwd", to={"sha256": "", "bytes": 1}), "'../../etc/passwd' is not a plain"),
        (_set("files", "/etc/passwd", to={"sha256": "", "bytes": 1}), "'/etc/passwd' is not a plain"),
        (_set("blocks", 0, "file", to="../other.bin"), "../other.bin is used but not listed"),
        (_set("graphs", "qkv", to="/tmp/evil.onnx"), "/tmp/evil.onnx is used but not listed"),
        (_drop("graphs", "head"), "graphs must be qkv"),
        (_drop("files", ROTARY_NAME), f"{ROTARY_NAME} is used but not listed"),
        (_set("files", ROTARY_NAME, "bytes", to=8), f"{ROTARY_NAME} must have 1024 bytes"),
        (_drop("blocks", 1), "has 3 blocks, not 2"),
        (_set("blocks", 1, "index", to=3), "blocks[1] must be block_2"),
        (_drop("blocks", 1, "tensors", "down.q"), "block_2: tensor down.q is None"),
        (_set("blocks", 1, "tensors", "down.q", "shape", to=[24, 17]), "block_2: tensor down.q"),
        (_set("blocks", 1, "tensors", "down.q", "dtype", to="object"), "dtype must be one of int8, uint8, float16"),
        (_set("blocks", 1, "tensors", "down.q", "offset", to=1), "tensor down.q at 1 is not aligned"),
        (_set("blocks", 1, "tensors", "down.q", "offset", to=1 << 40), "lies outside blocks/2.bin"),
        (_set("blocks", to={}), "blocks must be a list"),
        (_set("files", to=[]), "files: expected an object"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused_by_name(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    content = json.loads(make_manifest().encode())
    change(content)
    with pytest.raises(BlockFolderError) as caught:
        decode_manifest(json.dumps(content).encode())
    assert message in str(caught.value)
    assert str(caught.value).startswith("manifest.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("blocks", 0, "tensors", "o.q4", "dtype", to="int8"), "block_1: tensor o.q4"),
        (_set("blocks", 0, "tensors", "o.q4", "shape", to=[32, 64]), "block_1: tensor o.q4"),
        (_set("blocks", 0, "tensors", "o.gs", "dtype", to="float32"), "block_1: tensor o.gs"),
        (_set("blocks", 0, "tensors", "o.gs", "shape", to=[2, 64]), "block_1: tensor o.gs"),
        (_drop("blocks", 0, "tensors", "o.gs"), "block_1: tensor o.gs is None"),
        (_drop("blocks", 0, "tensors", "o.gm"), "block_1: tensor o.gm is None"),
        (_set("blocks", 0, "tensors", "o.gm", "dtype", to="float32"), "block_1: tensor o.gm"),
        (_set("blocks", 0, "tensors", "o.gm", "shape", to=[64]), "block_1: tensor o.gm"),
        (_set("model", "intermediate_size", to=90), "down has 90 inputs: w4a8 needs multiples of 32"),
        (_set("model", "heads", to=6), "o has 48 inputs: w4a8 needs multiples of 32"),
        (_set("graphs", "head", to="graphs/head.onnx"), "graphs must be none"),
    ],
)
def test_tensors_of_weights_in_groups_must_fit_together(change: Callable[[dict[str, Any]], None], message: str) -> None:
    content = json.loads(make_manifest(GROUPED, "w4a8").encode())
    assert decode_manifest(json.dumps(content).encode()).exact
    change(content)
    with pytest.raises(BlockFolderError, match=re.escape(message)):
        decode_manifest(json.dumps(content).encode())


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000, b'{"format": NaN}'])
def test_what_is_no_json_object_is_refused(content: bytes) -> None:
    with pytest.raises(BlockFolderError, match=r"manifest\.json"):
        decode_manifest(content)


@pytest.mark.parametrize(
    "path", ["", "/a", "a/../b", "..", ".", "./a", "a//b", "a/", "c:/a", "a\\b", "a\0b", "manifest.json", "~/../a"]
)
def test_paths_that_could_leave_the_folder_are_not_inside(path: str) -> None:
    assert not is_inside(path)


@pytest.mark.parametrize("path", ["a", "a/b.bin", "..a", "a..", "graphs/qkv.u8u8.onnx", "~"])
def test_plain_relative_paths_are_inside(path: str) -> None:
    assert is_inside(path)


JUNK = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([]), st.just({}))


@given(data=st.data())
def test_one_changed_value_is_either_another_valid_manifest_or_a_block_folder_error(data: st.DataObject) -> None:
    content = json.loads(make_manifest().encode())
    place: Any = content
    while True:
        step = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        inner = place[step]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
            break
        place = inner
    before = copy.deepcopy(content)
    place[step] = data.draw(JUNK)
    try:
        manifest = decode_manifest(json.dumps(content).encode())
    except BlockFolderError:
        return
    assert manifest == decode_manifest(manifest.encode())
    if content != before:
        assert manifest.model_hash != make_manifest().model_hash


SHAPES = st.lists(st.integers(1, 40), min_size=1, max_size=2).map(tuple)
TYPES: st.SearchStrategy[TensorType] = st.sampled_from(sorted(ITEM_BYTES))


@given(shapes=st.dictionaries(st.text(min_size=1, max_size=3), st.tuples(TYPES, SHAPES)))
def test_placed_tensors_are_aligned_in_order_and_do_not_overlap(
    shapes: dict[str, tuple[TensorType, tuple[int, ...]]],
) -> None:
    placed, size = place_tensors(shapes)
    end = 0
    assert list(placed) == list(shapes)
    for spec in placed.values():
        assert spec.offset % ALIGNMENT == 0
        assert end <= spec.offset < end + ALIGNMENT
        end = spec.offset + spec.nbytes
    assert size == end
