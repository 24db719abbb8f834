"""Measures blocks, hops between stages and loading on this machine, for `blockrelay profile`."""
