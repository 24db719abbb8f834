"""Probes of a device before a stage comes there: which floats it computes with, and how many tokens of a sequence it
attends rightly.

Where subgroups are small, the kernels of PagedAttention for 32 tokens of a sequence and more are wrong without an
error. There segments are cut into sequences of at most 31 tokens, if those are right. The probe runs the operator
alone, with the heads of the model and random rows, and compares it with standard operators on ONNX Runtime's CPU
provider. If the device refuses these heads, stages attend with standard operators.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.model import ModelConfig
from blockrelay.errors import KnownAnswerMismatch, UsageError
from blockrelay.observability.logs import get
from blockrelay_worker.execution.batch import Segment
from blockrelay_worker.execution.onnx.batches import batch_inputs, cut
from blockrelay_worker.execution.onnx.bound.session import BoundSession
from blockrelay_worker.execution.onnx.failures import classify
from blockrelay_worker.execution.onnx.graphs.flavours import PAGED, PLAIN, Flavour, FloatType
from blockrelay_worker.execution.onnx.known_answers import PAGES_NEEDED, STEPS, TOLERANCES, mismatch, row_error
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider, Provider
from blockrelay_worker.kernels.specification import PAGE

#: Tokens of a sequence in one step that are right on every known device.
CUT_ROWS = 31
#: The inputs of the probe's linear layer, by bits: not a multiple of two groups, and with 8 bits the last one not full.
_INPUTS = {8: 304, 4: 288}
_OUTPUTS, _ROWS = 96, (1, 2, 5, 16, 31, 32, 33, 65)
#: More than the longest context of `STEPS`.
_POSITIONS = PAGES_NEEDED * PAGE

#: Segments and rows of queries, keys and values [R, (heads + 2 kv_heads) head_dim] -> [R, heads * head_dim].
Attend = Callable[[Sequence[Segment], NDArray[np.float32]], NDArray[np.float32]]


def failure(provider: Provider, dtype: FloatType) -> str:
    """Returns what goes wrong when the device adds two numbers of type `dtype`; empty if nothing does. Raises
    ModuleNotFoundError if the package `onnx` is missing."""
    try:
        return failure_there(provider, dtype)
    except UsageError as error:
        return str(error)


def failure_there(provider: Provider, dtype: FloatType) -> str:
    """Returns what goes wrong when the device adds two numbers of type `dtype`; empty if nothing does.

    Raises UsageError where the cause is not the device: something that it needs is not installed. Raises
    ModuleNotFoundError if the package `onnx` is missing.
    """
    # Only here: `onnx` is part of the extras for GPUs.
    from blockrelay_worker.execution.onnx.graphs.stage import sum_graph

    ones = np.ones(4, dtype)
    try:
        session = provider.session(sum_graph(dtype), quiet=True)
        (result,) = session.run(None, {"a": ones, "b": ones})
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 ONNX Runtime's own exception types have no public common base
        return str(error).strip().rpartition(": ")[2]
    return "" if np.array_equal(np.asarray(result), ones + ones) else "the device computes 1 + 1 wrongly"


def can_multiply(provider: Provider, bits: int, dtype: FloatType) -> bool:
    """Returns whether the device multiplies rightly by small weights of `bits` bits (8 or 4), to `TOLERANCES` of
    `dtype`: with few rows and many, to take every path through the kernels. False also for a device that fails.

    Raises ModuleNotFoundError if the package `onnx` is missing.
    """
    from blockrelay_worker.execution.onnx.graphs.linears import matmul_graph, shapes

    random = np.random.default_rng(1)
    inputs = _INPUTS[bits]
    form = shapes("w", inputs, _OUTPUTS, bits)
    packed = random.integers(0, 256, form["w"], np.uint8)
    scales = random.uniform(0.01, 0.03, form["w.scales"]).astype(dtype)
    halves = packed if bits == 8 else np.stack([packed & 15, packed >> 4], axis=-1)
    whole = (halves.reshape(*scales.shape, -1) - 2.0 ** (bits - 1)) * scales[:, :, None].astype(np.float64)
    arrays = {"w": packed, "w.scales": scales}
    if "w.minimums" in form:
        arrays["w.minimums"] = random.uniform(-0.1, 0.1, form["w.minimums"]).astype(dtype)
        whole += arrays["w.minimums"].T[:, :, None]
    weights = whole.reshape(_OUTPUTS, -1)[:, :inputs].T
    try:
        session = provider.session(matmul_graph(inputs, _OUTPUTS, bits, dtype), quiet=True)
        held = {name: provider.upload(session, array) for name, array in arrays.items()}
        bound = BoundSession(session, held, {})
        for rows in _ROWS:
            x = random.normal(size=(rows, inputs)).astype(np.float32)
            if not row_error(bound.run({"x": x}, None)["y"], x.astype(np.float64) @ weights) <= TOLERANCES[dtype]:
                return False
    except Exception:  # noqa: BLE001 ONNX Runtime's own exception types have no public common base
        return False
    return True


def attention_on(provider: Provider, model: ModelConfig, flavour: Flavour) -> Attend:
    """Returns the attention of one layer of this model as a function, on PAGES_NEEDED pages of its own.

    They are empty at first, and each call writes those of its segments. Raises ONNX Runtime's error if the device
    refuses the graph, UsageError if this machine lacks something or a tensor is larger than the device allows. The
    function raises what ONNX Runtime raises.
    """
    from blockrelay_worker.execution.onnx.graphs.stage import attention_graph

    model = replace(model, max_position=_POSITIONS)
    session = provider.session(attention_graph(model, flavour))
    angles = np.outer(np.arange(_POSITIONS), 1e4 ** -np.linspace(0, 1, model.head_dim // 2, endpoint=False))
    held = {name: provider.upload(session, table(angles).astype(flavour.dtype)) for name, table in _TABLES.items()}
    shape = (PAGES_NEEDED, PAGE, model.kv_heads, model.head_dim)
    pools = {f"block_1/{half}": provider.empty(session, shape, flavour.dtype) for half in ("keys", "values")}
    bound = BoundSession(session, held, pools)

    def attend(segments: Sequence[Segment], rows: NDArray[np.float32]) -> NDArray[np.float32]:
        return bound.run({**batch_inputs(segments, flavour), "qkv": rows}, None)["attended"]

    return attend


_TABLES: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {"cos": np.cos, "sin": np.sin}


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """The abilities of a device's PagedAttention operator, for the heads of one model."""

    refusal: str = ""
    """Why the operator does not take these heads; empty if it does."""
    longest: int | None = None
    """Up to how many tokens of a sequence it is right; None: always."""


def paged_attention(provider: Provider, model: ModelConfig) -> PagedAttention:
    """Probes PagedAttention with the heads of `model`.

    Raises KnownAnswerMismatch for a device that is wrong in short sequences too, and ONNX Runtime's error where the
    device is lost or has no room. Any other error becomes the `refusal`, and is logged.
    """
    try:
        device = attention_on(provider, model, PAGED)
        reference = attention_on(CpuProvider(), model, PLAIN)
        return PagedAttention(longest=longest_sequence(device, reference, model, where=provider.device))
    except KnownAnswerMismatch:
        raise
    except Exception as error:  # ONNX Runtime's own exception types have no public common base
        if classify(str(error)).kind in ("device", "capacity"):
            raise
        refusal = str(error).strip().rpartition(": ")[2] or type(error).__name__
        heads = f"{model.heads} heads on {model.kv_heads} of {model.head_dim}"
        get().warning("PAGED_ATTENTION_REFUSED", device=provider.device, heads=heads, reason=refusal)
        return PagedAttention(refusal=refusal)


def longest_sequence(device: Attend, reference: Attend, model: ModelConfig, *, where: str) -> int | None:
    """Returns up to how many tokens of a sequence `device` attends as `reference` does; None if it always does.

    The only number that it returns is CUT_ROWS. Raises KnownAnswerMismatch naming the device `where` and the step that
    is wrong in short sequences too. Errors that `device` and `reference` raise pass through.
    """
    random = np.random.default_rng(1)
    cases: list[tuple[str, list[Segment], NDArray[np.float32], NDArray[np.float32]]] = []
    for step in STEPS:
        if not step.moved:
            rows = random.normal(size=(step.rows, model.qkv_columns)).astype(np.float32)
            cases.append((step.case, step.segments, rows, reference(step.segments, rows)))
    tolerance, wrong = TOLERANCES["float16"], {"": 0.0}
    for longest in (None, CUT_ROWS):
        errors = {
            case: row_error(device(segments if longest is None else cut(segments, longest), rows), right)
            for case, segments, rows, right in cases
        }
        wrong = {case: error for case, error in errors.items() if not error <= tolerance}  # not a number: wrong
        if not wrong:
            return longest
    case, error = next(iter(wrong.items()))
    what = f"{where} attends wrongly, in sequences of {CUT_ROWS} rows too: {case}"
    raise mismatch(what, error, tolerance, "block_1")
