"""The cells that a gateway serves: one, or several by a list; and which of them a new request goes to."""
