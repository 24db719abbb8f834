"""Logs, metrics, the status server."""
