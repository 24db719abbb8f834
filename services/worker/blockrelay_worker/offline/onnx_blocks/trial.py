"""Runs each ONNX block alone with made-up inputs, and compares its outputs with what the file declares."""

import gc
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.errors import OnnxBlocksError, UsageError
from blockrelay.onnx_blocks.dimensions import BlockDimensions, StepSizes
from blockrelay.onnx_blocks.model_file import model_without_weights, name_real_files
from blockrelay.onnx_blocks.reports.checking import CheckedBlock, CheckedTensor
from blockrelay.onnx_blocks.signature import Tensor
from blockrelay.onnx_blocks.wiring import FromBlock, Source
from blockrelay_worker.execution.onnx.as_is.finite import not_finite
from blockrelay_worker.execution.onnx.as_is.made_up import made_up
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider, Provider, nodes_by_provider
from blockrelay_worker.offline.onnx_blocks.folder import OnnxFolder
from blockrelay_worker.offline.onnx_blocks.onnx_file import OnnxFile

#: Maximum number of characters of a reason, which is one line of a table.
_LONGEST_REASON = 300
Array = NDArray[Any]


@dataclass(slots=True)
class _Given:
    """Outputs of earlier blocks that later ones take, by name: all shapes, and the arrays that are not floats."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    arrays: dict[str, Array] = field(default_factory=dict[str, Array])


def check_blocks(folder: OnnxFolder, provider: Provider, sizes: StepSizes) -> Iterator[CheckedBlock]:
    """Runs every block of the folder alone, in order, with one session at a time; yields each result.

    The made-up inputs are those of one step of `sizes`. A block also takes what earlier blocks gave: shapes, and the
    arrays that are not floats.

    Raises UsageError if this machine lacks something that the provider needs. Any other failure is in the block's
    result.
    """
    given = _Given()
    presents = {present.name for present in folder.wiring.presents.values()}
    consumed = folder.wiring.consumed()
    for file, sources in zip(folder.files, folder.wiring.sources, strict=True):
        yield _checked(file, sources, provider, sizes, given, presents=presents, consumed=consumed)
        gc.collect()  # an error may have held frames with the session in them


def _checked(
    file: OnnxFile,
    sources: Mapping[str, Source],
    provider: Provider,
    sizes: StepSizes,
    given: _Given,
    *,
    presents: set[str],
    consumed: frozenset[str],
) -> CheckedBlock:
    """Runs one block and returns its result. Records in `given` the outputs that later blocks take."""
    signature = file.signature
    dimensions = BlockDimensions(signature.file, sizes)
    inputs = [_declared(tensor) for tensor in signature.inputs]
    outputs = [_declared(tensor) for tensor in signature.outputs]
    load_seconds = seconds = nodes = on_cpu = None
    problem = ""
    try:
        feeds = _feeds(file, sources, dimensions, given)
        inputs = [_declared(tensor, feeds[tensor.name]) for tensor in signature.inputs]
        started = time.perf_counter()
        model = model_without_weights(file.path, signature.file)
        weights = name_real_files(model, file.path.parent)
        session = provider.mixed_session(model.SerializeToString(), weights, "few")
        del model
        load_seconds = time.perf_counter() - started
        if provider.ort_name != CpuProvider.ort_name and (where := nodes_by_provider(session)):
            nodes, on_cpu = sum(where.values()), where.get(CpuProvider.ort_name, 0)
        started = time.perf_counter()
        ran: Any = session.run([tensor.name for tensor in signature.outputs], feeds)
        seconds = time.perf_counter() - started
        del session
        arrays: list[Array] = list(ran)
        outputs = [_declared(tensor, array) for tensor, array in zip(signature.outputs, arrays, strict=True)]
        problem = _contradiction(signature.outputs, arrays, dimensions, presents) or _overflow(arrays, outputs)
        for tensor, array in zip(signature.outputs, arrays, strict=True):
            if tensor.name in consumed:
                given.shapes[tensor.name] = array.shape
                if array.dtype.kind != "f":
                    given.arrays[tensor.name] = array
    except UsageError:
        raise
    except (OnnxBlocksError, MemoryError) as error:
        problem = str(error) or "not enough memory"
    except Exception as error:  # noqa: BLE001 ONNX Runtime's own exception types have no public common base
        problem = _one_line(error)
    return CheckedBlock(
        block=signature.block,
        file=signature.file,
        problem=problem,
        load_seconds=load_seconds,
        seconds=seconds,
        nodes=nodes,
        nodes_on_cpu=on_cpu,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
    )


def _feeds(
    file: OnnxFile, sources: Mapping[str, Source], dimensions: BlockDimensions, given: _Given
) -> dict[str, Array]:
    """Made-up inputs of a block. Those with shapes from earlier blocks come first: they define named dimensions."""
    ordered = sorted(file.signature.inputs, key=lambda tensor: tensor.name not in given.shapes)
    feeds: dict[str, Array] = {}
    for tensor in ordered:
        source = sources[tensor.name]
        shape = dimensions.of_input(
            tensor, source, given.shapes.get(tensor.name) if isinstance(source, FromBlock) else None
        )
        feeds[tensor.name] = made_up(
            file.signature.file,
            tensor,
            source,
            shape,
            dimensions.sizes,
            vocabulary=file.vocabulary,
            given=given.arrays,
        )
    return feeds


def _contradiction(
    declared: tuple[Tensor, ...], arrays: list[Array], dimensions: BlockDimensions, presents: set[str]
) -> str:
    for tensor, array in zip(declared, arrays, strict=True):
        if str(array.dtype) != tensor.dtype:
            return f"{tensor.name}: is {array.dtype}, and the file declares {tensor.dtype}"
        if wrong := dimensions.contradiction(tensor, array.shape, is_present=tensor.name in presents):
            return wrong
    return ""


def _overflow(arrays: list[Array], outputs: list[CheckedTensor]) -> str:
    """The problem with the first output that has NaN or infinity, which no input has; empty if none does."""
    for tensor, array in zip(outputs, arrays, strict=True):
        if count := not_finite(array):
            return f"{tensor.name}: {count} of {array.size} numbers are NaN or infinite, and no input is"
    return ""


def _declared(tensor: Tensor, array: Array | None = None) -> CheckedTensor:
    if array is None:
        return CheckedTensor(tensor.name, tensor.dtype, tensor.dims)
    return CheckedTensor(tensor.name, tensor.dtype, tensor.dims, str(np.asarray(array).dtype), array.shape)


def _one_line(error: Exception) -> str:
    """ONNX Runtime's message in one line, without the prefix of its error codes."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text.removeprefix("[ONNXRuntimeError] : ")
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 3]}..."
