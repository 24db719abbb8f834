"""Scheduling: chooses the tokens of the next batch and estimates what a step costs."""
