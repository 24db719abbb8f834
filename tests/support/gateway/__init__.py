"""A gateway in a thread, and what clients send it byte by byte."""
