"""The options of `blockrelay up`: GPUs, the first plan, a topology of hosts. It reads files and lists devices."""
