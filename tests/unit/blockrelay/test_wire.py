"""Messages survive the wire, and nothing on the wire becomes code or an array we did not ask for."""

import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import msgpack_numpy
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockrelay.errors import WireError
from blockrelay.protocol.encoding import codec
from blockrelay.protocol.encoding.end_meta import encode_end_meta
from blockrelay.protocol.encoding.fallback_event import FallbackEvent
from blockrelay.protocol.encoding.fallback_policy import checked_policy
from blockrelay.protocol.encoding.forward_segment import ForwardSegment
from blockrelay.protocol.messages import (
    Ended,
    EndEntry,
    Forward,
    NextJob,
    RequestBody,
    TokenEntry,
    TokenLogprobs,
    decode_log_entry,
)
from blockrelay.protocol.sampling_params import SamplingParams

names = st.text(st.characters(codec="ascii", exclude_characters=","), max_size=20)
token_ids = st.integers(0, 2**31 - 1)


@given(st.lists(token_ids, min_size=1, max_size=50), names, st.integers(0, 5), st.booleans())
def test_a_request_body_comes_back_as_it_was(tokens: list[int], session: str, step: int, background: bool) -> None:
    body = RequestBody(
        prompt=np.array(tokens, np.int32),
        params={"max_tokens": 3},
        session=session,
        step=step,
        background=background,
        kv_given=len(tokens) // 16 * 16,
        kv_asked=tuple(range(step)),
    )
    again = RequestBody.decode(body.encode())
    assert again.prompt.tolist() == tokens and again.prompt.dtype == np.int32
    assert (again.params, again.session, again.step, again.background) == (
        SamplingParams(max_tokens=3).to_dict(),
        session,
        step,
        background,
    )
    assert (again.kv_given, again.kv_asked) == (body.kv_given, body.kv_asked)


@given(st.lists(st.tuples(names, st.lists(token_ids, min_size=1, max_size=4), st.booleans()), min_size=1, max_size=5))
def test_forwarded_rows_come_back_bit_by_bit(parts: list[tuple[str, list[int], bool]]) -> None:
    segments = tuple(
        ForwardSegment(request_id=name, run_id="r", sequence=i, position=i, token_ids=tuple(ids), ends_known=ends)
        for i, (name, ids, ends) in enumerate(parts)
    )
    count = sum(len(s.token_ids) for s in segments)
    rows = np.random.default_rng(count).standard_normal((count, 8), np.float32)
    message = Forward(sender="w", segments=segments, rows=rows, block_seconds={"block_1": 0.5})
    again = Forward.decode({name.encode(): value for name, value in message.encode().items()})
    assert again.segments == segments and again.block_seconds == {"block_1": 0.5}
    assert again.rows is not None and again.rows.tobytes() == rows.tobytes()


def test_rows_travel_in_the_bytes_of_releases_before() -> None:
    """Whose workers read them, and send such."""
    segment = ForwardSegment(request_id="q", run_id="ab", sequence=2, position=4, token_ids=(7, 9), ends_known=True)
    message = Forward(
        sender="w", segments=(segment,), rows=np.ones((2, 1), np.float32), block_seconds={"b": 0.5}, gpu_blocks=("b",)
    )
    head = (
        "86a17601a466726f6da177a668696464656e01a574696d657381a162cb3fe0000000000000a367707591a162a87365676d656e7473"
        "9197a171a261620204920709c300"
    )
    assert message.encode() == {"head": bytes.fromhex(head), "rows": bytes.fromhex("0000803f0000803f")}


def test_small_messages_of_the_scripts_are_read() -> None:
    assert NextJob.decode(packed(["q", "r", 4, [7, 8]])) == NextJob(
        request_id="q", run_id="r", position=4, tokens=(7, 8)
    )
    assert Ended.decode(packed(["q", "r"])) == Ended(request_id="q", run_id="r")
    assert decode_log_entry(b"3-0", {b"token": b"42"}) == [TokenEntry(3, 42)]
    (end,) = decode_log_entry(b"4-0", {b"end": b"error", b"meta": b'{"error":"x"}', b"numerics": b"n"})
    assert end == EndEntry(4, "error", {"error": "x"}, (), "n")
    times = {f"block_{i}": i * 0.012347 for i in range(3, 36)}
    meta = encode_end_meta({"execution_times": times, "seed": 2**53 - 1})
    (end,) = decode_log_entry(b"1-0", {b"end": b"stop", b"meta": meta.encode()})
    assert isinstance(end, EndEntry) and len(meta) < 300
    assert end.meta == {"execution_times": {n: round(s, 6) for n, s in times.items()}, "seed": 2**53 - 1}
    probs = TokenLogprobs(-0.5, ((1, -0.5), (2, -1.5)))
    assert TokenLogprobs.decode(probs.encode()) == probs


def packed(message: object) -> bytes:
    """As an attacker or an older version might write it, not as `wire.pack` does."""
    data = msgpack.packb(message, default=msgpack_numpy.encode)
    assert data is not None
    return data


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_pickled_array_is_refused_before_anything_runs(tmp_path: Path) -> None:
    target = tmp_path / "executed"
    for field in ("nd", "complex"):
        evil = {field: True, "type": "|O", "kind": "O", "shape": (1,), "data": pickle.dumps(Bomb(target))}
        with pytest.raises(WireError):
            codec.unpack(packed({"v": 1, "prompt": evil}))
        with pytest.raises(WireError):
            codec.unpack(packed({"v": 1, "prompt": {k.encode(): v for k, v in evil.items()}}))
    hidden = {b"nd": True, "kind": "", b"kind": b"O", "type": "<f4", b"data": pickle.dumps(Bomb(target))}
    with pytest.raises(WireError):  # what is looked at must be what the library reads
        codec.unpack(packed({"v": 1, "prompt": hidden}))
    assert not target.exists()


@pytest.mark.parametrize("array", [np.array([1.0], ">f8"), np.array(["a"]), np.array([1j])])
def test_array_dtypes_outside_the_list_are_refused(array: Any) -> None:
    with pytest.raises(WireError, match="not allowed"):
        codec.unpack(packed({"v": 1, "a": array}))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_wire_error(data: bytes) -> None:
    for read in (codec.unpack, codec.unpack_list, RequestBody.decode):
        try:
            read(data)
        except WireError:
            continue


@pytest.mark.parametrize(("size", "rows", "hidden"), [(0, 0, 4), (15, 1, 4), (16, 2, 4), (16, -1, -4)])
def test_rows_of_another_size_are_refused(size: int, rows: int, hidden: int) -> None:
    with pytest.raises(WireError):
        codec.rows_from_bytes(bytes(size), rows, hidden)


def test_another_version_is_refused() -> None:
    with pytest.raises(WireError, match="version"):
        codec.unpack(packed({"v": 2}))


def test_a_fallback_event_is_read() -> None:
    plain = {"block_id": "block_4", "from": "GPU", "to": "CPU", "reason": "gpu_error", "success": True, "position": 3}
    told = {**plain, "blocks": [4, 5]}
    event = FallbackEvent.decode(told)
    assert (event.error_code, event.rows_recomputed, event.cause) == (None, None, "gpu_error")
    finer = FallbackEvent.decode({**told, "reason": "gpu_timeout", "error_code": "TIMEOUT", "rows": 2})
    assert (finer.blocks, finer.error_code, finer.cause) == (("block_4", "block_5"), "TIMEOUT", "gpu_error")
    assert finer.to_json() == {
        **plain,
        "blocks": ["block_4", "block_5"],
        "reason": "gpu_timeout",
        "error_code": "TIMEOUT",
        "rows_recomputed": 2,
    }
    assert FallbackEvent.decode({**told, "reason": "worker_death"}).cause == "worker_death"
    for wrong in ("block_4", [4], [4, 10**9], ["4", "5"]):
        with pytest.raises(WireError):
            FallbackEvent.decode({**told, "blocks": wrong})
    with pytest.raises(WireError):
        FallbackEvent.decode(plain)


@pytest.mark.parametrize("policy", ["allow", "recompute", "deny", "max:2.0", "max:0.25", "max:1e-05", "max:1e+300"])
def test_a_fallback_policy_is_read_as_it_was_written(policy: str) -> None:
    asked = replace(RequestBody(prompt=np.array([1], np.int32), params={}), fallback=policy)
    assert RequestBody.decode(asked.encode()).fallback == policy == checked_policy(policy)


@pytest.mark.parametrize(
    "wrong",
    ["never", "", "max:", "max:2", "max:0.0", "max:-1.0", "max:nan", "max:inf", "MAX:2.0", " max:2.0", 2.0, None],
)
def test_another_fallback_policy_is_refused(wrong: object) -> None:
    with pytest.raises(WireError):
        checked_policy(wrong)
    if wrong is not None:
        odd = replace(RequestBody(prompt=np.array([1], np.int32), params={}), fallback=wrong)  # pyright: ignore
        with pytest.raises(WireError):
            RequestBody.decode(odd.encode())


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan, math.inf, True, "2"])
def test_slowdowns_of_an_event_are_above_zero_and_finite(wrong: object) -> None:
    event = {"block_id": "b", "from": "GPU", "to": "CPU", "reason": "r", "success": True, "blocks": [1, 2]}
    read = FallbackEvent.decode({**event, "predicted": 2, "seen": 2.5})
    assert (read.predicted_slowdown, read.seen_slowdown) == (2.0, 2.5)
    for name in ("predicted", "seen"):
        with pytest.raises(WireError):
            FallbackEvent.decode({**event, name: wrong})
