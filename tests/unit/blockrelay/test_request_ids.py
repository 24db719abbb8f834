"""Ids of requests: those of clients name the cell, and every form of them leads back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockrelay.protocol.encoding.request_ids import RequestId, own_id, parse_id, public_id

DIGITS = "0123456789abcdef01234567"
CELLS = st.one_of(st.just(""), st.from_regex(r"[a-z0-9-]{1,32}", fullmatch=True), st.just(DIGITS), st.just("-"))


@given(CELLS, st.sampled_from(["req", "cmpl", "chatcmpl"]), st.from_regex(r"[0-9a-f]{24}", fullmatch=True))
def test_what_is_given_to_a_client_is_understood(cell: str, prefix: str, digits: str) -> None:
    text = public_id(f"req-{digits}", cell, prefix)  # pyright: ignore[reportArgumentType]
    assert parse_id(text) == RequestId(f"req-{digits}", cell, prefix)  # pyright: ignore[reportArgumentType]
    assert own_id(text) == f"req-{digits}"


@pytest.mark.parametrize(
    "text",
    ["", "req-", f"req-{DIGITS}0", f"req-{DIGITS[1:]}", f"x-{DIGITS}", f"req-C0-{DIGITS}", f"req-{'c' * 33}-{DIGITS}",
     f"req--{DIGITS.upper()}", f" req-{DIGITS}", f"req-{DIGITS}\n", f"req-c0{DIGITS}"],
)  # fmt: skip
def test_anything_else_is_no_id(text: str) -> None:
    assert parse_id(text) is None and own_id(text) == text
