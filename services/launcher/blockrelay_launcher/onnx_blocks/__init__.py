"""Commands for ONNX blocks that others made. The worker runs them, in a process of its own."""
