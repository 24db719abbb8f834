"""A draft model beside the served one: its guesses, what they cost, and whether they pay."""
