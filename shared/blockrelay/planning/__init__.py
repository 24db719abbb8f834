"""What planners work from: what was measured (`profile`) and which devices there are (`devices`). Only data."""
