"""The protocol between services: Redis keys, records, messages, and the scripts that change them."""
