"""How values become bytes in Redis, and how bytes are checked before they are values."""
