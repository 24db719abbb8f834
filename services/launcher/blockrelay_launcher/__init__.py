"""The blockrelay command: starts every service as a local process."""
