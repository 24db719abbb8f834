"""The routes: requests of clients to orders, entries of logs to answers."""
