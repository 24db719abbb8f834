"""Linear layers computed by ONNX Runtime, alone or beside our own kernels."""
