"""The machine that we run on."""
