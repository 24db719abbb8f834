"""What blocks multiply with, as a device has it."""
