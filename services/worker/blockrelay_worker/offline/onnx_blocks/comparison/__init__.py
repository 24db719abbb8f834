"""Compares imported blocks with the ONNX blocks that they were made of, by running both."""
