"""Runs one stage of blocks on ragged batches."""
