"""`blockrelay bench`."""
