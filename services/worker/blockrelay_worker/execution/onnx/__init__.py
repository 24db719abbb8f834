"""The executor for GPUs: whole stages as ONNX graphs, run by the execution providers of ONNX Runtime."""
