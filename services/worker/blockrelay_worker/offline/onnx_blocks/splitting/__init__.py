"""Splits a decoder in one ONNX file into blocks: reads it, and writes the blocks that a plan names."""
