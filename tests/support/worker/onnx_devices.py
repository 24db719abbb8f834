"""Devices to test the ONNX executor on: ONNX Runtime's own CPU kernels, and what `make software-gpu` sets up."""

import pytest

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("webgpu:0", id="webgpu", marks=pytest.mark.software_gpu)]
