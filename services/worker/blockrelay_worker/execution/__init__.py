"""Executors run one stage of a model: a batch goes in, hidden states or logits come out."""
