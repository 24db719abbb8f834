"""How a gateway ends: what it still does once it has been told to, and who acts on it."""
