"""Reading a checkpoint."""
