"""One worker process of the model."""
