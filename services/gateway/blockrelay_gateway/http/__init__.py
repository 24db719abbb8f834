"""HTTP itself: the server, its limits, who may ask, errors. Knows no route."""
