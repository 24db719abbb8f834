"""The parts of a drill that act on its system, each in a thread of its own."""
