"""ONNX Runtime's execution providers, one module each."""
