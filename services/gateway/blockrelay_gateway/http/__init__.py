"""HTTP for all routes: the server, its limits, authentication, errors. It knows no route."""
