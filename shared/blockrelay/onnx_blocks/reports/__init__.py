"""Reports of the processes that work on ONNX blocks, to the process that shows them: one JSON line each."""
