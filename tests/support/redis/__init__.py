"""Real Redis servers for tests, and ways to make them answer badly."""
