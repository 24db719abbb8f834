"""What `up` was asked for: options, the plan it starts with, a topology of hosts. Pure, but for files that are read."""
