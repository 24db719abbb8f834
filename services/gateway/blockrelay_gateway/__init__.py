"""The gateway: it validates, tokenises and admits requests of clients, and relays their token logs."""
