"""The command `blockrelay bench`: measures the speed through the gateway and in process."""
