"""Tensor steps: tokens, padding, positions and steps of a session."""

from typing import Any

import pytest

from blockrelay.errors import BadRequest, Conflict
from blockrelay_gateway.api.infer.tensor_steps import Session, TensorStep, check_names, read_inputs, read_steps


def tensor(*values: int) -> dict[str, Any]:
    return {"_tensor_": True, "data": list(values)}


def steps(*sessions: Session, number: int = 1, logits: Any = "last", **inputs: Any) -> list[TensorStep]:
    """The steps of a batch; without `sessions` its rows have no session yet."""
    read = read_inputs(inputs, context=64, vocab_size=100)
    known = sessions or (Session(),) * read.rows
    return read_steps(read, known, session_id="chat", step=number, logits=logits)


def step(session: Session | None = None, *, number: int = 1, logits: Any = "last", **inputs: Any) -> TensorStep:
    (found,) = steps(*([session] if session else []), number=number, logits=logits, **inputs)
    return found


def after(first: TensorStep) -> Session:
    assert first.session is not None
    return Session(step=first.step, fingerprint=first.session.fingerprint, tokens=first.tokens)


def test_the_first_step_of_a_session_is_its_tokens() -> None:
    found = step(input_ids=tensor(5, 6, 7), attention_mask=tensor(1, 1, 1), position_ids=tensor(0, 1, 2))
    assert found.tokens == (5, 6, 7)
    assert (found.prior, found.new, found.step) == (0, 3, 1)


def test_the_second_step_goes_on_where_the_first_ended() -> None:
    session = after(step(input_ids=tensor(5, 6, 7)))
    short = step(session, number=2, input_ids=tensor(8), attention_mask=tensor(1), position_ids=tensor(3))
    long = step(session, number=2, input_ids=tensor(8), attention_mask=tensor(1, 1, 1, 1), position_ids=tensor(3))
    assert short == long
    assert short.tokens == (5, 6, 7, 8)
    assert (short.prior, short.new) == (3, 1)


@pytest.mark.parametrize("mask", [(0, 0, 1, 1), (1, 1, 0, 0), (0, 1, 1, 0)])
def test_padding_at_either_end_is_stripped_with_its_positions(mask: tuple[int, ...]) -> None:
    first = mask.index(1)
    positions = [0] * 4
    positions[first + 1] = 1
    found = step(input_ids=tensor(1, 2, 3, 4), attention_mask=tensor(*mask), position_ids=tensor(*positions))
    assert found.tokens == (1, 2, 3, 4)[first : first + 2]


def test_the_same_step_again_is_the_same_request() -> None:
    first = step(input_ids=tensor(5, 6), position_ids=tensor(0, 1))
    again = step(after(first), number=1, input_ids=tensor(5, 6), position_ids=tensor(0, 1))
    assert again == first


@pytest.mark.parametrize(
    ("number", "ids", "logits"), [(1, (5, 7), "last"), (1, (5, 6), "all"), (3, (8,), "last"), (9, (8,), "last")]
)
def test_any_other_step_is_a_conflict_that_names_the_expected_one(
    number: int, ids: tuple[int, ...], logits: str
) -> None:
    with pytest.raises(Conflict, match="expects step 2") as refused:
        step(after(step(input_ids=tensor(5, 6))), number=number, logits=logits, input_ids=tensor(*ids))
    assert refused.value.param == "step"


def test_rows_of_a_batch_are_sessions_of_their_own_at_one_step() -> None:
    ids, mask = [[0, 5, 6], [7, 8, 9]], [[0, 1, 1], [1, 1, 1]]
    positions = [[0, 0, 1], [0, 1, 2]]
    first = steps(input_ids=ids, attention_mask=mask, position_ids=positions)
    assert [found.tokens for found in first] == [(5, 6), (7, 8, 9)]
    assert [found.column for found in first] == [1, 0]
    assert [found.session and found.session.session for found in first] == ["chat#0", "chat#1"]
    second = steps(
        *map(after, first),
        number=2,
        input_ids=[[1], [2]],
        attention_mask=[[*mask[0], 1], [*mask[1], 1]],  # with the padding of the first step
        position_ids=[[2], [3]],
    )
    assert [found.tokens for found in second] == [(5, 6, 1), (7, 8, 9, 2)]
    assert [found.prior for found in second] == [2, 3]
    assert steps(*map(after, first), input_ids=ids, attention_mask=mask) == first, "the same step again"


def test_one_row_of_a_mask_and_of_positions_stands_for_all() -> None:
    found = steps(input_ids=[[1, 2], [3, 4]], attention_mask=[1, 1], position_ids=[[0, 1]])
    assert [row.tokens for row in found] == [(1, 2), (3, 4)]


def test_a_row_belongs_to_its_batch() -> None:
    """A step that equals the first in one row only is no repetition: a second client must not get in between."""
    one = steps(input_ids=[[1, 2], [3, 4]])
    for other in ([[1, 2], [3, 5]], [[1, 2], [3, 4], [5, 6]], [[1, 2]]):
        with pytest.raises(Conflict, match="expects step 2"):
            steps(*map(after, one), *[Session()] * (len(other) - 2), input_ids=other) if len(other) > 1 else step(
                after(one[0]), input_ids=other
            )


IDS = tensor(5, 6, 7)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no input_ids": ({"attention_mask": IDS}, "input_ids"),
    "past keys": ({"input_ids": IDS, "past_key_values.0.key": IDS}, "past_key_values.0.key"),
    "rows of rows": ({"input_ids": [[[1], [2]]]}, "input_ids"),
    "too many rows": ({"input_ids": [[1]] * 129}, "input_ids"),
    "a mask of other rows": ({"input_ids": [[1], [2], [3]], "attention_mask": [[1], [1]]}, "attention_mask"),
    "positions of other rows": ({"input_ids": [[1], [2], [3]], "position_ids": [[0], [0]]}, "position_ids"),
    "a bad position in the last row": ({"input_ids": [[1], [2]], "position_ids": [[0], [1]]}, "position_ids"),
    "no ids": ({"input_ids": {"_tensor_": True, "data": [[]]}}, "input_ids"),
    "ids that are fractions": ({"input_ids": {"_tensor_": True, "dtype": "float32", "data": [1.0]}}, "input_ids"),
    "an id out of range": ({"input_ids": tensor(100)}, "input_ids"),
    "a negative id": ({"input_ids": tensor(-1)}, "input_ids"),
    "more than the context": ({"input_ids": tensor(*[1] * 200)}, "input_ids"),
    "a short mask": ({"input_ids": IDS, "attention_mask": tensor(1, 1)}, "attention_mask"),
    "a long mask": ({"input_ids": IDS, "attention_mask": tensor(1, 1, 1, 1)}, "attention_mask"),
    "a mask with a hole": ({"input_ids": IDS, "attention_mask": tensor(1, 0, 1)}, "attention_mask"),
    "a mask of zeros": ({"input_ids": IDS, "attention_mask": tensor(0, 0, 0)}, "attention_mask"),
    "a mask of twos": ({"input_ids": IDS, "attention_mask": tensor(1, 2, 1)}, "attention_mask"),
    "positions from elsewhere": ({"input_ids": IDS, "position_ids": tensor(1, 2, 3)}, "position_ids"),
    "positions with a gap": ({"input_ids": IDS, "position_ids": tensor(0, 1, 3)}, "position_ids"),
    "too few positions": ({"input_ids": IDS, "position_ids": tensor(0, 1)}, "position_ids"),
    "ids that are text": ({"input_ids": "1 2"}, "input_ids"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_step_is_refused_by_the_name_of_its_tensor(name: str) -> None:
    inputs, param = BAD[name]
    with pytest.raises(BadRequest) as refused:
        step(**inputs)
    assert refused.value.param == f"input_tensors.{param}"


def test_a_session_needs_a_step_and_a_step_a_session() -> None:
    assert check_names(None, None) == check_names(None, 1) == 1
    assert check_names("chat_001", 3) == 3
    for session_id, number, param in (
        (None, 2, "session_id"), ("", 1, "session_id"), ("a b", 1, "session_id"), ("x" * 129, 1, "session_id"),
        ("a", None, "step"), ("a", 0, "step"), ("a", 1 << 40, "step"),
    ):  # fmt: skip
        with pytest.raises(BadRequest) as refused:
            check_names(session_id, number)
        assert refused.value.param == param


def test_a_session_reads_back_from_redis() -> None:
    assert Session.from_redis({}) == Session()
    fields = {b"step": b"2", b"fingerprint": b"ab", b"tokens": b"\x05\0\0\0\xff\xff\0\0"}
    assert Session.from_redis(fields) == Session(step=2, fingerprint="ab", tokens=(5, 65535))
