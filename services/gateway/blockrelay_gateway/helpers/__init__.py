"""Processes beside the gateway that read large bodies: the interpreter of the gateway itself is never held by one."""
