"""ONNX blocks made by others: what their files declare, and how the blocks fit together.

Only `model_file` needs the package `onnx`.
"""
