"""Imports ONNX blocks as a block folder (`blockrelay import`): reading, recognising, writing and comparing them."""
