"""Tests on a machine with an NVIDIA GPU: `make gpu-kit` builds a folder, and `python -m bench.gpu_kit` runs there.

The modules that run before the kit's packages are installed (`__main__`, `contents`, `machine`, `parts`, `report`,
`vulkan`) need only Python.
"""
