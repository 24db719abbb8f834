"""ONNX blocks as a source of weights, and `blockrelay import`, which makes a block folder of them."""
