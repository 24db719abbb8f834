"""Checks that this ONNX Runtime has the operators of a graph, before any weights are loaded.

ONNX Runtime has no public list of its operators. So a graph of one node with wrong inputs is loaded for each: the
error message tells whether the operator is unknown, or only its inputs are wrong.
"""

from collections.abc import Iterable
from functools import cache

import onnxruntime as ort
from onnx import TensorProto, helper

from blockrelay.errors import OnnxBlocksError
from blockrelay_worker.offline.onnx_blocks.onnx_file import OnnxFile

_UNKNOWN = ("No Op registered for", "is not a registered function/op")


def check_operators(files: Iterable[OnnxFile]) -> None:
    """Raises OnnxBlocksError with file and tensor for an operator that no provider of this ONNX Runtime has."""
    for file in files:
        for operator in file.operators:
            if not _is_known(operator.domain, operator.kind, operator.version):
                raise OnnxBlocksError(
                    f"is made by the operator {operator} of version {operator.version}, which this ONNX Runtime "
                    f"({ort.__version__}) does not have",
                    file=file.signature.file,
                    tensor=operator.output,
                )


@cache
def _is_known(domain: str, kind: str, version: int) -> bool:
    """True unless ONNX Runtime says that it has no such operator."""
    node = helper.make_node(kind, ["x"], ["y"], domain=domain)
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    graph = helper.make_graph([node], "one", [value], [helper.make_empty_tensor_value_info("y")])
    sets = [helper.make_opsetid(domain, version)] + ([helper.make_opsetid("", 21)] if domain else [])
    model = helper.make_model(graph, opset_imports=sets, ir_version=10)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 ONNX Runtime's own exception types have no public common base
        return not any(words in str(error) for words in _UNKNOWN)
    return True
