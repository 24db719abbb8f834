"""Tool calling: what a request declares, the grammar of calls, and how an answer's text is cut into them."""
