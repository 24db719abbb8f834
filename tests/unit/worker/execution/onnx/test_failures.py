"""The meaning of each error text of ONNX Runtime and its providers; the texts are real ones."""

import pytest

from blockrelay.observability.metrics.worker import DEVICE_LOSSES
from blockrelay_worker.execution.onnx.failures import TABLE, Judge, classify
from blockrelay_worker.execution.onnx.tries import CANNOT

NODE = "Non-zero status code returned while running {} node. Name:'block_7/{}' Status Message: "
TEXTS = [
    (
        "device_removed",
        "DmlCommandQueue.cpp(48) Exception(2) 887A0006 The GPU will not respond to more commands, most likely because "
        "of an invalid command passed by the calling application.",
    ),
    ("device_removed", "DmlExecutionProvider: HRESULT 887A0005 The GPU device instance has been suspended."),
    ("device_lost", "WebGPU device lost (2): A valid external Instance reference no longer exists."),
    ("device_lost", "vkQueueSubmit failed with VK_ERROR_DEVICE_LOST"),
    ("device_lost", "L0 zeFenceHostSynchronize result: ZE_RESULT_ERROR_DEVICE_LOST, code 0x70000001"),
    (
        "out_of_memory",
        NODE.format("MatMul", "o_product")
        + "bfc_arena.cc:376 void* onnxruntime::BFCArena::AllocateRawInternal Failed to allocate memory for requested "
        "buffer of size 2097152",
    ),
    ("out_of_memory", "CUDA failure 2: out of memory ; GPU=0 ; hostname=a"),
    ("out_of_memory", "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0"),
    ("out_of_memory", "[GPU] clEnqueueNDRangeKernel, error code: -5 CL_OUT_OF_RESOURCES"),
    ("device_limit", "[GPU] Exceeded max size of memory object allocation: requested 6442450944 bytes"),
    ("device_limit", "WebGPU validation failed. [Invalid Buffer (unlabeled)] is invalid due to a previous error."),
    ("device_limit", "Buffer size (4294967296) exceeds the max buffer size limit (2147483648)."),
    ("illegal_access", "CUDA failure 700: an illegal memory access was encountered ; GPU=0"),
    ("illegal_access", "CUDA failure 719: unspecified launch failure"),
    ("ecc_error", "CUDA failure 214: uncorrectable ECC error encountered"),
    (
        "refused",
        NODE.format("GroupQueryAttention", "attn")
        + "batch_size must be 1 when sequence_length > 1 and past context is given.",
    ),
    ("refused", "Program MatMul requires f16 but the device does not support it."),
    ("unknown", "the moon is full"),
]


@pytest.mark.parametrize(("reason", "text"), TEXTS)
def test_a_text_means_what_its_row_says(reason: str, text: str) -> None:
    found = classify(text)
    assert found.reason == reason and found.text == text
    assert (found.code == "OOM") == (found.kind == "capacity")
    assert found.block == ("block_7" if "block_7/" in text else None)


def test_each_row_has_a_text_here_and_none_is_hidden_by_one_before_it() -> None:
    assert {row.reason for row in TABLE} == {reason for reason, _ in TEXTS} - {"unknown"}
    for row in TABLE:
        assert all(classify(text.upper()).reason == row.reason for text in row.texts)


def test_what_nobody_knows_may_happen_once() -> None:
    judge = Judge()
    assert judge.judge("the moon is full").kind == "unknown"
    assert judge.judge("CUDA failure 2: out of memory").kind == "capacity"
    second = judge.judge("the moon is new")
    assert (second.kind, second.reason) == ("device", "unknown_twice")


def test_every_loss_of_a_device_has_its_metric() -> None:
    reasons = {row.reason for row in TABLE if row.kind == "device"}
    assert reasons | CANNOT | {"process_ended", "hang", "canary", "rank_ended"} == set(DEVICE_LOSSES)
