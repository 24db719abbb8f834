"""The scripts that write truth: `lua/` has one for each transition, `calls` calls them, `source` puts them together."""
