"""What a worker does when the plan gives it another place or block folder, or memory lacks for its own."""
