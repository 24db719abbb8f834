"""ONNX blocks that others made: what their files declare, and how the blocks fit together. Pure, without ONNX."""
