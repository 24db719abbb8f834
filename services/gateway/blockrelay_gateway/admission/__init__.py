"""Admission: decides which requests are accepted, and under which id."""
