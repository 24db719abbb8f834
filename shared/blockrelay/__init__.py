"""Blockrelay core: keys, messages, scripts, formats and settings that all services share. It imports no service."""

__version__ = "0.2.0"
