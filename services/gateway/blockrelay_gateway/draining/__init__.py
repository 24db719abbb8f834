"""The end of a gateway: its phases after a signal, and the parts that act on them."""
