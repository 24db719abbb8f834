"""What Redis has of a request, running or ended: its record and its log."""
