"""Which blocks can have fewer bits: `convert --budget-perplexity`."""
