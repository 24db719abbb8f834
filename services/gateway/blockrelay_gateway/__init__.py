"""HTTP front: validates, tokenises, admits and relays the token log."""
