"""/v1/requests/{id}: what became of a request, and its events."""
