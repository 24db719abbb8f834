"""How one decoder is cut into blocks, decided from its graph as data. Pure, without ONNX."""
