"""`blockrelay demo`: a whole system for a while, that answers one prompt, a person, or a file of prompts."""
