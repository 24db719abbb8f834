"""ONNX blocks that others made, run as they are."""
