"""ONNX blocks that others made: looked at and tried, without a queue."""
