"""The life cycle of a worker, from its first contact with Redis to its drain: registration, heartbeat, devices."""
