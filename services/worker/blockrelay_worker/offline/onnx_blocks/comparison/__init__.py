"""Compares imported blocks with the ONNX blocks that they were made from, by running both."""
