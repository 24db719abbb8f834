"""The process that owns a device, apart from its worker, so that a worker outlives whatever a driver does to that
process."""
