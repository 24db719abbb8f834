"""The command `blockrelay demo`: starts a system that answers one prompt, a chat, or a file of prompts, and ends it."""
