"""Proof on a machine with an NVIDIA GPU: `make` builds the folder that travels, `python -m bench.gpu_kit` runs there.

What runs before the packages of the kit are there (`__main__`, `contents`, `machine`, `parts`, `report`, `vulkan`)
needs nothing but Python.
"""
