"""Parts of a worker, driven by hand."""
