"""Graphs of stages, built node by node: what every flavour shares, and the attention of each."""
