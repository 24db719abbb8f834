"""What a model and a load need: memory, Redis, disk, network and processes, from measured costs."""
