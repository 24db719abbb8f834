"""Values that stay on a device from step to step: KV pages, and sessions with their weights bound."""
