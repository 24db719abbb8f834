"""Products of ONNX Runtime beside ours."""
