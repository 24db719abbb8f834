"""The ONNX graphs of a block folder: one linear layer each, without weights, the same for every block of a model.

    w8a8  <kind>       u uint8 [rows, K] x q int8 [K, N]    -> y float32 [rows, N]   MatMulIntegerToFloat
    w8a8  <kind>.u8u8  u uint8 [rows, K] x q uint8 [K, N]   -> y, q = weights + 128, for CPUs where u8 x s8 saturates
    w4a8  none: ONNX Runtime has no matmul that adds the groups in a fixed order
    fp32, fp16
          <kind>       x float32 [rows, K] x w float32 [K, N] -> y float32 [rows, N]  MatMul
                       (`<kind>.fp32` in a folder of several precisions); for fp16, the caller widens w first

y = float(sum over k of (u - 128) * q) * scale[n]; the row's scale is applied by the kernel that reads y.
`q` and `scale` (or `w`) are initializers whose external data does not exist: the worker supplies them from the mapped
block file when it makes the session (`SessionOptions.add_external_initializers`). Nothing else is left open.
"""

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from blockrelay.block_folder.model import FLOATS, ModelConfig, Precision, graph_kinds

_OPSET, _MICROSOFT_OPSET, _IR_VERSION = 21, 1, 10


def graph(model: ModelConfig, precision: Precision, kind: str) -> bytes:
    """Returns the serialised ONNX model of one linear layer of `kind`, such as `qkv`, `qkv.u8u8` or `qkv.fp32`.

    `precision` is not w4a8. The bytes depend on the model's shape, `precision` and `kind` alone.
    """
    rows, columns = model.linear_shape(kind.partition(".")[0])
    initializers: list[TensorProto]
    if precision in FLOATS:
        node = helper.make_node("MatMul", ["x", "w"], ["y"])
        source = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", rows])
        initializers = [_supplied("w", TensorProto.FLOAT, (rows, columns), 4)]
    else:
        shifted = kind.endswith(".u8u8")
        inputs = ["u", "q", "one", "scale", "zero", *(["zero"] if shifted else [])]
        node = helper.make_node("MatMulIntegerToFloat", inputs, ["y"], domain="com.microsoft")
        source = helper.make_tensor_value_info("u", TensorProto.UINT8, ["rows", rows])
        initializers = [
            _supplied("q", TensorProto.UINT8 if shifted else TensorProto.INT8, (rows, columns), 1),
            _supplied("scale", TensorProto.FLOAT, (columns,), 4),
            numpy_helper.from_array(np.array(1, np.float32), "one"),
            numpy_helper.from_array(np.array(128, np.uint8), "zero"),
        ]
    target = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", columns])
    made = helper.make_model(
        helper.make_graph([node], kind, [source], [target], initializers),
        producer_name="blockrelay",
        ir_version=_IR_VERSION,
        opset_imports=[helper.make_opsetid("", _OPSET), helper.make_opsetid("com.microsoft", _MICROSOFT_OPSET)],
    )
    return made.SerializeToString(deterministic=True)


def graphs(model: ModelConfig, precisions: Sequence[Precision]) -> dict[str, bytes]:
    """Returns every graph of a block folder, serialised, by its kind."""
    return {kind: graph(model, precision, kind) for kind, precision in graph_kinds(precisions).items()}


def _supplied(name: str, dtype: int, shape: tuple[int, ...], item_bytes: int) -> TensorProto:
    tensor = onnx.TensorProto(name=name, data_type=dtype, dims=shape, data_location=TensorProto.EXTERNAL)
    size = item_bytes * int(np.prod(shape, dtype=np.int64))
    for key, value in (("location", "supplied"), ("offset", "0"), ("length", str(size))):
        tensor.external_data.add(key=key, value=value)
    return tensor
