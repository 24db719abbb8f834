"""Reference logits, by which answers of nondeterministic devices are measured."""
