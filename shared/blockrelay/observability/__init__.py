"""Logs, metrics and the HTTP server for health checks of every service."""
