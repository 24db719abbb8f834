"""Tensors that stages of ONNX blocks hand on: which ones, their sizes, their batch axis, and what is refused."""

from collections.abc import Sequence

import pytest

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.handed_on import (
    MAX_BYTES,
    bytes_handed_on,
    check_borders,
    handed_on,
    max_rows,
    row_bytes,
)
from blockrelay.onnx_blocks.signature import Dimension, Signature, Tensor
from blockrelay.onnx_blocks.wiring import Wiring, wire
from blockrelay.protocol.encoding.named_tensors import MAX_TENSORS
from blockrelay.protocol.plan import Stage

B, S, P, T = "batch_size", "sequence_length", "past_sequence_length", "past_sequence_length + sequence_length"


def tensor(name: str, *dims: Dimension, dtype: str = "float16") -> Tensor:
    return Tensor(name, dtype, dims)


IDS = tensor("input_ids", B, S, dtype="int64")
LOGITS = tensor("logits", B, S, 512)


def caches(role: str, layer: int, positions: str = P) -> list[Tensor]:
    return [tensor(f"{role}.{layer}.{half}", B, 2, positions, 16) for half in ("key", "value")]


def model(*first: Tensor, later: Sequence[Tensor] | None = None, ids: Tensor = IDS) -> Wiring:
    """Two layers and the head: both others take what block 1 makes; `later`: as their files have it."""
    hidden = [tensor(f"hidden_{number}", B, S, 64) for number in (1, 2)]
    taken = list(first if later is None else later)
    return wire(
        [
            Signature(1, "block_1.onnx", (ids, *caches("past", 0)), (*first, hidden[0], *caches("present", 0, T))),
            Signature(
                2, "block_2.onnx", (*taken, hidden[0], *caches("past", 1)), (hidden[1], *caches("present", 1, T))
            ),
            Signature(3, "block_3.onnx", (*taken, hidden[1]), (LOGITS,)),
        ]
    )


def test_what_later_blocks_take_travels_also_past_stages_that_do_not_make_it() -> None:
    wiring = model(tensor("mask", B, 1, S, T), tensor("cos", S, 16, dtype="float32"))
    assert [(one.name, one.batch_axis) for one in handed_on(wiring, 1)] == [("mask", 0), ("cos", None), ("hidden_1", 0)]
    assert [(one.name, one.maker.index) for one in handed_on(wiring, 2)] == [("mask", 1), ("cos", 1), ("hidden_2", 2)]
    assert handed_on(wiring, 3) == ()
    assert bytes_handed_on(wiring, 2, new=5, past=11) == 2 * 5 * 16 + 4 * 5 * 16 + 2 * 5 * 64
    assert row_bytes(wiring, 2, 100) == 2 * 100 + 4 * 16 + 2 * 64


@pytest.mark.parametrize(
    ("dims", "axis"),
    [
        (("b", 1, "", ""), 0),
        (("", "", "", ""), 0),
        (("unk__1", "unk__2", 64), 0),
        ((1, 1, "", ""), None),
        ((16, B, S), 1),
        ((1,), None),
        ((), None),
        (("rows",), None),
    ],
)
def test_the_axis_of_sequences_follows_from_names_and_places(dims: tuple[Dimension, ...], axis: int | None) -> None:
    assert handed_on(model(tensor("x", *dims)), 1)[0].batch_axis == axis


def test_names_of_a_file_are_what_the_request_says_they_are() -> None:
    wiring = model(tensor("x", "s77", "s0", 4), ids=tensor("input_ids", "s0", "s77", dtype="int64"))
    assert handed_on(wiring, 1)[0].batch_axis == 1


def test_a_graph_of_one_sequence_has_no_axis_of_them() -> None:
    wiring = model(tensor("x", "", "", 64), ids=tensor("input_ids", 1, S, dtype="int64"))
    assert handed_on(wiring, 1)[0].batch_axis is None


def test_integers_without_an_axis_of_sequences_may_count_them() -> None:
    shapes = [tensor("batch", 1, dtype="int64"), tensor("rows", B, dtype="int32"), tensor("open", 1, 1, dtype="bool")]
    assert [one.may_count for one in handed_on(model(*shapes), 1)] == [True, False, False, False]


def test_a_step_has_as_many_rows_as_its_borders_take() -> None:
    """A stage that takes and one that hands on; none where there is neither."""
    wiring, long = model(tensor("mask", B, 1, S, T, dtype="float32")), 1 << 20
    each = row_bytes(wiring, 1, long)
    assert each == 4 * long + 2 * 64
    for first, last in ((1, 1), (2, 2), (2, 3), (3, 3)):
        assert max_rows(wiring, Stage(first=first, last=last), long, 4096) == MAX_BYTES // each == 15
    assert (
        max_rows(wiring, Stage(first=1, last=3), long, 4096)
        == max_rows(wiring, Stage(first=1, last=1), 64, 4096)
        == 4096
    )


def _refused(wiring: Wiring, *ends: int, longest: int = 4096) -> str:
    stages = [Stage(first=first + 1, last=last) for first, last in zip((0, *ends), ends, strict=False)]
    check_borders(wiring, [Stage(first=1, last=3)], longest)  # in one stage nothing travels
    with pytest.raises(OnnxBlocksError) as refused:
        check_borders(wiring, stages, longest)
    return str(refused.value)


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (
            [Tensor("x", "float16", None)],
            "block_1.onnx: x: is of unknown dimensions (a dynamic rank), and would travel behind block_1",
        ),
        (
            [tensor(f"huge_{number}", B, 1 << 28, dtype="float32") for number in range(100)],
            "block_1.onnx: huge_0: takes 1,073,741,824 bytes for one row of a context of 4,096 positions, of "
            "107,374,182,528 that would travel behind block_1, where 64 MiB may",
        ),
        (
            [tensor(f"x_{number}", B, S) for number in range(MAX_TENSORS)],
            "block_1.onnx: 257 tensors would travel behind block_1, and a stage hands on 256 at most",
        ),
        ([tensor("x", B, S, dtype="complex64")], "block_1.onnx: x: is complex64, and what travels between stages is"),
        ([tensor("x", B, S, dtype="bfloat16")], "block_1.onnx: x: is bfloat16, and what travels"),
        ([tensor("x", B, B)], "block_1.onnx: x: is (batch_size, batch_size), and has the batch in several dimensions"),
        ([tensor("x", "", "", "")], "block_1.onnx: x: is (?, ?, ?): nothing tells how long dimension 2 is"),
    ],
)
def test_what_cannot_travel_is_refused_by_file_and_tensor(first: list[Tensor], said: str) -> None:
    assert _refused(model(*first), 1, 3).startswith(said)


def test_the_longest_context_decides() -> None:
    wiring = model(tensor("mask", B, 1, S, T, dtype="float32"))
    check_borders(wiring, [Stage(first=1, last=1), Stage(first=2, last=3)], 1 << 20)
    said = "block_1.onnx: mask: takes 134,217,728 bytes for one row of a context of 33,554,432 positions"
    assert _refused(wiring, 1, 3, longest=1 << 25).startswith(said)


def test_blocks_that_belong_together_stay_in_one_stage() -> None:
    hidden = tensor("hidden", B, S, 64)
    blocks = [
        Signature(1, "block_1.onnx", (IDS, *caches("past", 0)), (hidden, *caches("present", 0, T))),
        Signature(2, "block_2.onnx", (hidden, *caches("past", 0)), (LOGITS,)),
        Signature(3, "block_3.onnx", (hidden,), (tensor("value", B, S, 1),)),
    ]
    wiring = wire(blocks)
    said = "block_2.onnx: past.0.key: is the keys of layer 0, which block_1.onnx makes: both must be in one stage"
    assert _refused(wiring, 1, 3) == said
    said = "block_2.onnx: logits: is made by block_2: those behind it must be in its stage"
    assert _refused(wiring, 2, 3) == said
