"""ONNX graphs that the executor builds: stages, their attention, KV pages, and selection."""
