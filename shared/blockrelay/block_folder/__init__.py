"""The folder of a converted model."""
