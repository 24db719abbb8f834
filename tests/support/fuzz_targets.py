"""What reads bytes that others may have written, as functions of bytes, with messages that do decode as seeds.

A target returns whatever it makes of the bytes and may raise only what its contract names (`Target.refuses`); any other
exception, a crash or a hang is a fault. `test_codecs.py` tries mutated seeds in the default suite, `campaign.py` lets
atheris look for more.
"""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from blockrelay.block_folder.manifest import MANIFEST_NAME, FileSpec, decode_manifest
from blockrelay.errors import BadRequest, BlockFolderError, OnnxBlocksError, WireError
from blockrelay.onnx_blocks.blocks_file import BlockFiles, decode_blocks_file, encode_blocks_file
from blockrelay.onnx_blocks.signature import Signature, Tensor
from blockrelay.protocol.encoding import codec
from blockrelay.protocol.encoding.forward_segment import ForwardSegment
from blockrelay.protocol.encoding.named_tensors import NamedTensors
from blockrelay.protocol.encoding.stage_span import StageSpan
from blockrelay.protocol.messages import (
    Ended,
    Forward,
    NextJob,
    RequestBody,
    TokenLogprobs,
    decode_log_entry,
)
from blockrelay.protocol.tensors import HEADER_BYTES, ResultReader, decode_tensor, encode_result
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_worker.kv.store.record import PageShape, decode_record, encode_record
from blockrelay_worker.transport.local_rows.frames import Hello, describe, read_descriptor
from tests.support.json_tensors import json_tensor

NAME = bytes(range(32))
BLOCK_FILES = BlockFiles(
    Signature(1, "block_1.onnx", (Tensor("input_ids", "int64", ("batch", 1)),), (Tensor("logits", "float16", None),)),
    {"block_1.onnx": FileSpec(sha256="a" * 64, bytes=10)},
)
SHAPE = PageShape(kv_heads=1, head_dim=8, dtype=np.float16)


@dataclass(frozen=True)
class Target:
    read: Callable[[bytes], object]
    refuses: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]


def join(*parts: bytes) -> bytes:
    """Several fields as one string of bytes: each with its length before it. `split` takes them apart."""
    return b"".join(struct.pack("<H", len(part)) + part for part in parts)


def split(data: bytes, most: int) -> list[bytes]:
    """At most `most` fields; what a length promises and the bytes do not hold is cut."""
    parts: list[bytes] = []
    while len(data) >= 2 and len(parts) < most:
        (size,) = struct.unpack_from("<H", data)
        parts.append(data[2 : 2 + size])
        data = data[2 + size :]
    return parts


def _forward(data: bytes) -> object:
    return Forward.decode(dict(zip((b"head", b"rows"), split(data, 2), strict=False)))


def _forward_tensors(data: bytes) -> object:
    return Forward.decode(dict(zip((b"head", b"tensors"), split(data, 2), strict=False)))


def _stage_span(data: bytes) -> object:
    return StageSpan.decode({b"span": data})


def _log_entry(data: bytes) -> object:
    entry_id, *fields = split(data, 9) or [b""]
    return decode_log_entry(entry_id, dict(zip(fields[::2], fields[1::2], strict=False)))


def _tensor(data: bytes) -> object:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None  # not ours: the web framework parses bodies
    return decode_tensor(value, param="x", max_elements=64)


def _result(data: bytes) -> object:
    return ResultReader(np.zeros((2, 5), np.float16)).begin(data[:HEADER_BYTES])


def _descriptor(data: bytes) -> object:
    fields = read_descriptor(data, 1000)
    assert all(0 <= begin <= end <= 1000 for _, begin, end in fields)
    return fields


def _page(data: bytes) -> object:
    return decode_record(data, NAME, 3, SHAPE)


_half = np.arange(SHAPE.half_bytes // 2, dtype=np.float16)
_segment = ForwardSegment(request_id="req-1", run_id="ab", sequence=0, position=4, token_ids=(7, 9), ends_known=True)
_rows = Forward(sender="w", segments=(_segment,), rows=np.ones((2, 3), np.float32), block_seconds={"block_1": 0.5})
_parts = [NamedTensors(rows=1, arrays={"x": np.ones((1, 1, 3), np.float16), "y": np.ones(1, np.int64)})] * 2
_named = Forward(sender="w", segments=(_segment,), tensors=[_parts])
_body = RequestBody(prompt=np.array([1, 2], np.int32), params={"max_tokens": 3, "stop": ["x"]}, session="s", step=1)
_step = StageSpan(
    run=1, worker_id="host:1:ab", stage=0, first=1, last=4, number=7, kind="decode", position=9, rows=1, batch_rows=3,
    ready_us=1_800_000_000_000_000, waited_us=20, computed_us=900,
)  # fmt: skip
_FALLBACKS = (
    b'[{"block_id": "block_1", "blocks": [1, 1], "from": "GPU", "to": "CPU", "reason": "gpu_error", "success": true, '
    b'"predicted": 2.5, "seen": 3}]'
)
_tensors = (np.arange(6).reshape(2, 3), np.ones(2, np.bool_), np.ones((1, 2), np.float16))

TARGETS: dict[str, Target] = {
    "message": Target(codec.unpack, (WireError,), (codec.pack({"a": np.ones(2, np.float32), "b": [1, "x"]}),)),
    "script list": Target(codec.unpack_list, (WireError,), (codec.pack_for_script([1, "x", [2]]),)),
    "request body": Target(RequestBody.decode, (WireError,), (_body.encode(),)),
    "forward": Target(_forward, (WireError,), (join(*_rows.encode().values()),)),
    "forward of tensors": Target(_forward_tensors, (WireError,), (join(*_named.encode().values()),)),
    "next job": Target(
        NextJob.decode, (WireError,), (NextJob(request_id="q", run_id="r", position=4, tokens=(7, 8)).encode(),)
    ),
    "hello of a worker": Target(Hello.decode, (WireError,), (Hello("w", "ab").encode(),)),
    "descriptor": Target(
        _descriptor,
        (WireError,),
        (
            describe({"head": b"1", "rows": b"2345"}, 16),
            describe({"next_job": b"1"}, 0),
            describe({"head": b"1", "tensors": b"2345"}, 16),
        ),
    ),
    "ended": Target(Ended.decode, (WireError,), (codec.pack_for_script(["q", "r"]),)),
    "log entry": Target(
        _log_entry,
        (WireError,),
        (
            join(b"3-0", b"token", b"42", b"logprobs", TokenLogprobs(-0.5, ((1, -0.5),)).encode().encode()),
            join(b"4-0", b"end", b"error", b"meta", b'{"error": "x"}', b"fallbacks", _FALLBACKS),
            join(
                b"4-0",
                b"end",
                b"stop",
                b"all",
                codec.pack_for_script([7, 8]),
                b"logprobs",
                codec.pack_for_script(["[-1,[]]", ""]),
            ),
        ),
    ),
    "stage span": Target(_stage_span, (WireError,), tuple(_step.encode().values())),
    "log probabilities": Target(
        lambda data: TokenLogprobs.decode(data.decode("latin-1")),
        (WireError,),
        (TokenLogprobs(-0.5, ((1, -0.5), (2, -1.5))).encode().encode(),),
    ),
    "result": Target(_result, (WireError,), (encode_result(np.ones((2, 5), np.float32)),)),
    "tensor": Target(
        _tensor,
        (BadRequest,),
        (
            *(json.dumps(json_tensor(array)).encode() for array in _tensors),
            b'{"_tensor_": true, "data": [[1, 2], [3, 4]], "dtype": "float32"}',
        ),
    ),
    "page": Target(_page, (), (bytes(encode_record(NAME, 3, SHAPE, _half, _half)),)),
    "blocks file": Target(
        lambda data: decode_blocks_file(data, "blocks.json"),
        (OnnxBlocksError,),
        (encode_blocks_file([BLOCK_FILES]).encode(),),
    ),
    "manifest": Target(decode_manifest, (BlockFolderError,), ((BUNDLED_MODEL / MANIFEST_NAME).read_bytes(),)),
}


def attempt(name: str, data: bytes) -> bool:
    """Let the target read `data`. False when it refused them as its contract says; what else it raises comes out."""
    target = TARGETS[name]
    try:
        target.read(data)
    except target.refuses:
        return False
    return True
