"""Turns text into tokens and back, and reads the files about text beside a model's weights."""
