"""The scheduler of a cell: it declares workers dead, publishes the plan, and rescues requests that are stuck."""
