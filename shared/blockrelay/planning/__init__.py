"""The inputs of planners: measured times (`profile`), costs of blocks (`costs`), devices (`devices`); and the check
that a model can be cut into the stages of a plan (`cuts`)."""
