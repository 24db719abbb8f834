"""A client of the gateway that resumes its stream when a gateway or connection fails."""
