"""The folder of a converted model: its manifest, its checks, and how its tensors are read."""
