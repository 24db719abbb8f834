"""What stays on a device while steps come and go: sessions with their values bound, and KV pages."""
