"""The cells that a gateway serves (one, or several by a list), and the choice of a cell for each new request."""
