"""What is compiled once and used again: optimised graphs and shaders on disk, decode steps captured on the device."""
