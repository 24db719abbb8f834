"""From logits to the next token, and when a request is over. Pure."""
