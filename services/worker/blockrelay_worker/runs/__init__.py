"""Runs as data: what a worker knows of one attempt at a request, and its KV pages."""
