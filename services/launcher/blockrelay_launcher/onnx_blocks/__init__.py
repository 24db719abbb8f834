"""The commands for ONNX blocks of other tools. Processes of the worker or converter do the work."""
