"""The command line of `blockrelay`: its commands, options and help texts."""
