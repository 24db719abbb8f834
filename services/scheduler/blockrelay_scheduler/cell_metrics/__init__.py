"""What a scheduler tells of its cell: gauges, and how many workers are wanted."""
