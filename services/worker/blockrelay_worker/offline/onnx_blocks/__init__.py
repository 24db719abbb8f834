"""Commands for ONNX blocks of other makers: check, describe, compare and split them, without services."""
