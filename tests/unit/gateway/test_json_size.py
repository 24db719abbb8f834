"""The estimated memory of parsed JSON is never below the real one."""

import json
import tracemalloc

import pytest

from blockrelay_gateway.helpers.json_size import parsed_bytes

SIZE = 200_000
TEXTS = {
    "empty objects": b"[" + b"{}," * (SIZE // 3) + b"{}]",
    "empty lists": b"[" + b"[]," * (SIZE // 3) + b"[]]",
    "lists in lists": b"[" + b"[[]]," * (SIZE // 5) + b"1]",
    "lists of one": b"[" + b"[1]," * (SIZE // 4) + b"1]",
    "objects of one": b"[" + b'{"":1},' * (SIZE // 7) + b"1]",
    "objects of two": b"[" + b'{"a":1,"b":2},' * (SIZE // 14) + b"1]",
    "one large object": b"{" + b",".join(b'"%d":{}' % number for number in range(SIZE // 12)) + b"}",
    "deep objects": b'{"a":' * 900 + b"1" + b"}" * 900,
    "floats": b"[" + b"1.5," * (SIZE // 4) + b"1]",
    "integers": b"[" + b"999," * (SIZE // 4) + b"1]",
    "short texts": b"[" + b'"ab",' * (SIZE // 5) + b"1]",
    "one wide character": json.dumps(["a" * SIZE + "\U0001f600"], ensure_ascii=False).encode(),
    "one wide character, escaped": json.dumps(["a" * SIZE + "\U0001f600"]).encode(),
    "two bytes each": json.dumps(["\u0431" * (SIZE // 2)], ensure_ascii=False).encode(),
    "plain text": json.dumps(["Once upon a time, " * (SIZE // 18)]).encode(),
}


@pytest.mark.parametrize("name", TEXTS)
def test_it_is_enough_and_not_many_times_too_much(name: str) -> None:
    raw = TEXTS[name]
    tracemalloc.start()
    try:
        json.loads(raw)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0.97 * peak < parsed_bytes(raw) < 5 * peak
