"""Plans how a decoder is split into blocks, from its graph as data. Pure: imports neither onnx nor ONNX Runtime."""
