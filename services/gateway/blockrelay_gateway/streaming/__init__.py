"""Reads token logs once for many clients, and turns them into answers and event streams."""
