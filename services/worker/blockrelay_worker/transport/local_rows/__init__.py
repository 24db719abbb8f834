"""Sends rows to workers on the same host: through shared memory and a Unix socket, without Redis."""
