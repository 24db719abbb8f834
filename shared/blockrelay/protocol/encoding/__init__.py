"""Encoding of values as bytes in Redis, and decoding with checks."""
