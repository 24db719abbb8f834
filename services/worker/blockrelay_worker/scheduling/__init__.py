"""Scheduling: chooses the rows of the next batch and estimates what a step costs."""
