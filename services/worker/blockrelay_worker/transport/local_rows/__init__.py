"""Rows to a worker on the same host: written into shared memory, told through a Unix socket, without Redis."""
