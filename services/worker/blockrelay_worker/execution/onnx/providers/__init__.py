"""ONNX Runtime's execution providers, one module each, and the choice of one by a device's name."""
