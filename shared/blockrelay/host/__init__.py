"""The host: its processors, memory, GPU sensors, limits and identity, and folders that are written atomically."""
