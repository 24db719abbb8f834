"""The HTTP routes: they turn clients' requests into admission requests, and token logs into answers."""
