"""Ranks: processes of one host that compute a stage together, each with a share of its weights and KV pages."""
