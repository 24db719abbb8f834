"""What runs here and its next step: jobs in, batches through the executor, commits out."""
