"""Reports on ONNX blocks are lines of JSON, which the process that reads them gets as they were."""

import json
from typing import Any

import pytest

from blockrelay.errors import WireError
from blockrelay.onnx_blocks.llama.graph import TensorPlace
from blockrelay.onnx_blocks.llama.model import RowPlaces
from blockrelay.onnx_blocks.reports.checking import CheckBegins, CheckedBlock, CheckedTensor
from blockrelay.onnx_blocks.reports.codec import decode, encode, send
from blockrelay.onnx_blocks.reports.describing import Described
from blockrelay.onnx_blocks.reports.importing import (
    ComparedBlock,
    ComparedPlaces,
    ImportReport,
    ImportResult,
    ImportStep,
)
from blockrelay.onnx_blocks.reports.splitting import SplitBegins, SplitBlock, SplitWrites

COMPARED = ComparedBlock("block_1", {"keys": 0.25, "values": 1.0})
#: Each report, and the line that releases before the common codec wrote for it.
WRITTEN: list[tuple[Any, str]] = [
    (CheckBegins((("block_1", "block_1.onnx"),)), '{"blocks": [["block_1", "block_1.onnx"]]}'),
    (
        CheckedBlock(
            block="block_1",
            file="block_1.onnx",
            load_seconds=0.5,
            seconds=0.25,
            nodes=10,
            nodes_on_cpu=2,
            inputs=(CheckedTensor("a", "float16", ("batch", 64), "float16", (5, 64)),),
            outputs=(CheckedTensor("b", "float16", None),),
        ),
        '{"block": "block_1", "file": "block_1.onnx", "passed": true, "problem": "", "load_seconds": 0.5, '
        '"seconds": 0.25, "nodes": 10, "nodes_on_cpu": 2, "inputs": [{"name": "a", "declared_dtype": "float16", '
        '"declared": ["batch", 64], "dtype": "float16", "shape": [5, 64]}], "outputs": [{"name": "b", '
        '"declared_dtype": "float16", "declared": null, "dtype": "", "shape": null}]}',
    ),
    (Described("/cache/blocks", ("no chat",)), '{"folder": "/cache/blocks", "lacking": ["no chat"]}'),
    (
        SplitBegins(
            (
                SplitBlock(
                    file="block_2.onnx", nodes=7, border=("sum",), inputs=("sum",), outputs=("end",), weight_bytes=4
                ),
            ),
            "linked",
            17,
        ),
        '{"blocks": [{"file": "block_2.onnx", "nodes": 7, "border": ["sum"], "inputs": ["sum"], "outputs": ["end"], '
        '"weight_bytes": 4}], "weights": "linked", "bytes": 17}',
    ),
    (SplitWrites("block_1.onnx", 5), '{"file": "block_1.onnx", "bytes": 5}'),
    (
        ComparedPlaces(
            (RowPlaces((TensorPlace(1, "sum"), TensorPlace(2, "down")), TensorPlace(1, "k"), TensorPlace(1, "v")),),
            TensorPlace(3, "logits"),
        ),
        '{"layers": [{"hidden": [{"block": 1, "tensor": "sum"}, {"block": 2, "tensor": "down"}], "keys": {"block": 1, '
        '"tensor": "k"}, "values": {"block": 1, "tensor": "v"}}], "logits": {"block": 3, "tensor": "logits"}}',
    ),
    (COMPARED, '{"block": "block_1", "errors": {"keys": 0.25, "values": 1}, "problem": ""}'),
    (ImportReport(step=ImportStep("block_1", 5, 17)), '{"step": {"what": "block_1", "bytes": 5, "total": 17}}'),
    (
        ImportReport(
            result=ImportResult(
                name="mine",
                family="llama",
                precision="w8a8",
                stored="fp16",
                blocks=1,
                bytes=4_000,
                compared=(COMPARED,),
                cost=None,
                notes=("there is no chat",),
            )
        ),
        '{"result": {"name": "mine", "family": "llama", "precision": "w8a8", "stored": "fp16", "blocks": 1, '
        '"bytes": 4000, "compared": [{"block": "block_1", "errors": {"keys": 0.25, "values": 1.0}, "problem": ""}], '
        '"cost": null, "notes": ["there is no chat"]}}',
    ),
]
KINDS = [pytest.param(report, line, id=type(report).__name__) for report, line in WRITTEN]


@pytest.mark.parametrize(("report", "line"), KINDS)
def test_a_report_comes_back_as_it_was_and_so_does_an_earlier_releases_line(report: Any, line: str) -> None:
    assert decode(type(report), encode(report).encode()) == report
    assert decode(type(report), line.encode()) == report
    written = json.loads(line)
    assert {name: value for name, value in json.loads(encode(report)).items() if name in written} == {
        name: value for name, value in written.items() if name != "passed"
    }


def test_a_report_is_sent_as_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    send(SplitWrites("block_1.onnx", 5))
    assert capsys.readouterr().out == '{"file": "block_1.onnx", "bytes": 5}\n'


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"", "a line is no SplitWrites: Invalid JSON"),
        (b'{"file": "a"}', "a line is no SplitWrites: bytes: Field required"),
        (b'{"file": "a", "bytes": "5"}', "a line is no SplitWrites: bytes: Input should be a valid integer"),
        (b'{"file": "a", "bytes": true}', "a line is no SplitWrites: bytes: Input should be a valid integer"),
        (b'["a", 5]', "a line is no SplitWrites: Input should be"),
    ],
)
def test_anything_else_is_refused(line: bytes, problem: str) -> None:
    with pytest.raises(WireError, match=problem):
        decode(SplitWrites, line)
