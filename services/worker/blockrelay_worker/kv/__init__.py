"""KV pages: block hashes, the prefix cache, and the page store that workers share."""
