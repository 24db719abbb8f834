"""Devices to test the ONNX executor on: ONNX Runtime's own CPU kernels."""

DEVICES = ["cpu"]
