"""One decoder in one ONNX file, cut into blocks: read, planned elsewhere, written."""
