"""API keys of clients, access of web pages, and the passwords of Redis."""
