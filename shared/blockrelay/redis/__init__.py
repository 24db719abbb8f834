"""Clients of Redis, its errors, its users, and what is read there directly."""
