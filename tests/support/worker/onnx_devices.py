"""Devices to test the ONNX executor on, and types of floats: ONNX Runtime's own CPU kernels, and what `make
software-gpu` sets up."""

import pytest

FLOAT16 = (pytest.mark.software_gpu, pytest.mark.float16)
DEVICES = [
    ("cpu", "float32"),
    ("cpu", "float16"),
    pytest.param("webgpu:0", "float32", marks=pytest.mark.software_gpu),
    pytest.param("webgpu:0", "float16", marks=FLOAT16),
]
#: The types that stages of quantised models have: float32 on WebGPU for want of float16 alone.
CHOSEN = [
    DEVICES[0],
    pytest.param("webgpu:0", "float32", marks=(pytest.mark.software_gpu, pytest.mark.driver_on_cpu)),
    DEVICES[3],
]
#: For what is the same in every type of floats.
NAMES = ["cpu", pytest.param("webgpu:0", marks=pytest.mark.software_gpu)]
