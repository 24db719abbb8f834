"""Chooses the precision of each block within a limit of perplexity: `convert --budget-perplexity`."""
