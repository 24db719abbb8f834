"""The seam of executors: a batch in, rows or logits out."""
