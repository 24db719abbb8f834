"""Recognises the Llama pattern in ONNX blocks: which tensor is which weight. Pure, and without the package `onnx`."""
