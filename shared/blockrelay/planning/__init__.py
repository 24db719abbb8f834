"""What planners work from: what was measured (`profile`), what blocks cost (`costs`) and which devices there are
(`devices`), and whether a model can be cut as they plan (`cuts`)."""
