"""Helper processes that read large bodies, so that no body holds the gateway's own interpreter."""
