"""ACCEPT: which requests are let in, under which id."""
