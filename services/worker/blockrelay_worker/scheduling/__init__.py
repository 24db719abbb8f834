"""Which rows the next batch has, and what a step costs."""
