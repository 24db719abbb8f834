"""What services agree on: keys, records, messages, transitions."""
