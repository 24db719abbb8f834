"""`blockrelay up`: a whole system on one machine, started again when a part of it ends."""
