"""Scenarios, each of which measures one thing: overload, recovery, a killed gateway, the memory of ended requests."""
