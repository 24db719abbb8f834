"""`blockrelay plan`: decide, explain and compare plans, without a cell."""
