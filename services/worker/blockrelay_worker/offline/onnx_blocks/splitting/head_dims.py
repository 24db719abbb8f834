"""Finds the head dimension of KV caches in files that give it a name and no number, as onnxruntime-genai's do."""

from collections.abc import Iterable, Mapping

from onnx import NodeProto, ValueInfoProto

_ATTENTION = "GroupQueryAttention"
#: Indexes of inputs and outputs: queries (with keys and values in them, if there are no keys), keys, pasts, presents.
_QUERIES, _KEYS, _PASTS, _PRESENTS = 0, 1, slice(3, 5), slice(1, 3)
_RANK = 4


def with_head_dims(
    types: Mapping[str, ValueInfoProto], nodes: Iterable[NodeProto], widths: Mapping[str, int]
) -> dict[str, ValueInfoProto]:
    """Returns `types` with the last dimension of KV caches set where it has no number.

    `types` and `widths` are by tensor name; a width is the count of numbers per token. The dimension is the width of
    the keys that a GroupQueryAttention node reads (or of queries, keys and values in one tensor), divided by its number
    of heads. A cache stays as it is if its width or number of heads is unknown, or if the division leaves a rest.
    """
    result = dict(types)
    for node in nodes:
        if node.op_type != _ATTENTION or len(node.input) <= _KEYS:
            continue
        numbers = {attribute.name: attribute.i for attribute in node.attribute}
        kv_heads, heads = numbers.get("kv_num_heads", 0), numbers.get("num_heads", 0)
        keys = node.input[_KEYS]
        count = kv_heads if keys else heads + 2 * kv_heads
        width = widths.get(keys or node.input[_QUERIES], 0)
        if count <= 0 or width <= 0 or width % count:
            continue
        for name in (*node.input[_PASTS], *node.output[_PRESENTS]):
            if name in result and len(result[name].type.tensor_type.shape.dim) == _RANK:
                value = ValueInfoProto()
                value.CopyFrom(result[name])
                last = value.type.tensor_type.shape.dim[_RANK - 1]
                if not last.dim_value:
                    last.dim_value = width // count
                result[name] = value
    return result
