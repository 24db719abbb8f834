"""A worker from its first look at Redis to its drain: registration, heartbeat, role."""
