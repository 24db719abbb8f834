"""The `blockrelay` command."""
