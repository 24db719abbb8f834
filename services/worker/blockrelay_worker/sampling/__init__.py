"""Sampling: chooses the next token from logits, drafts tokens, and decides where a request ends. Pure."""
