"""Optimised graphs kept on disk, and decode steps that a device has recorded."""
