"""How long blocks, hops and loading take on this machine: what `blockrelay profile` measures."""
