"""Converts a checkpoint in Hugging Face's layout, or a folder of ONNX blocks, to a block folder."""
