"""What planners work from: what was measured (`profile`), what blocks cost (`costs`) and which devices there are
(`devices`). Only data."""
