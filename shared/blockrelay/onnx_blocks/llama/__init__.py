"""Recognises the Llama pattern in ONNX blocks: which tensor is which weight of the model. Pure, without ONNX."""
