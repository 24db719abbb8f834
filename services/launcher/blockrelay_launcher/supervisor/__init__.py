"""Runs `blockrelay up`: a whole system on one machine, whose processes are restarted when they end."""
