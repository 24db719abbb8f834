"""Blockrelay core: what every service shares (words, keys, messages, scripts, formats). It imports no service."""

__version__ = "0.2.0"
