"""The command `blockrelay drill`: hurts a loaded system at random and compares every answer.

workload   random requests, and the answer of each alone (computed in other processes)
chats      the tools that chats declare, and how answers are cut into their calls
closeness  distances of answers from reference logits, for nondeterministic devices
faults     the faults, drawn from a seed: processes killed or stopped, a full Redis, cut connections
system     the system to hurt: `blockrelay up` with several gateways, and the role of each process
users      runs services as the Redis users of deploy/redis
clients    the clients: streams, background requests, cancelled ones, tensor sessions
parts      the work on the system: faults, a rolling upgrade, a change of plan, retries of lost GPUs
from_logs  facts from the logs afterwards
report     the verdict on every request, and the table
command    the whole drill
"""
