"""What is done to the system of a drill, each in a thread of its own."""
