"""The drill on a control Redis that fails over: `python -m tests.support.failover_drill` (make drill-failovers).

load       the clients of `blockrelay drill`, and such that find out what was taken back
failovers  the masters, cut off and killed, or replaced as planned; and gateways
course     one drill: a system at an arrangement of servers, under load, and its verdict
"""
