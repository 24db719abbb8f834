"""Logits of a model that nothing disturbs, by which answers are measured whose bits nobody computes again."""
