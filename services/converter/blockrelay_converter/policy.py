"""The numbers of policy of `blockrelay analyse --sizing`: shares and limits, each with its unit and its reason.

The measured costs, from which the needs of a load are computed, are in `sizing/measured.py`.
"""

# Sizing

#: Share of a core, of a worker's time and of a Redis thread that is planned for; the rest is for bursts.
PLANNED_SHARE = 0.7
#: Seconds that the disk may add to a first token: a reader notices more.
FIRST_TOKEN_DISK_S = 0.1
#: The least number of each: with fewer, the service does not survive the loss of a node.
LEAST_GATEWAYS = 2
LEAST_SCHEDULERS = 2
