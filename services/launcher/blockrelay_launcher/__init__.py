"""The `blockrelay` command: starts services as local processes, shows and measures systems, and runs other tools."""
