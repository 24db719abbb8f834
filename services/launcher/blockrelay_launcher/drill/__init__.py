"""`blockrelay drill`: a system under load that is hurt at random; every answer is compared.

asks       random requests, and what each gives alone (in processes of their own)
closeness  how near answers are to reference logits, where two runs differ in bits
faults     what is done to the system, drawn from a seed: processes killed or stopped, a full Redis, cut connections
system     the system to be hurt: `blockrelay up` with several gateways, and which process is whose
users      the Redis users of deploy/redis in force
load       clients: streams, background requests, cancelled ones, tensor sessions
kills      the faults, done and undone, and whom they concerned
upgrade    workers of another numerics id take the place of the old ones
from_logs  what the logs tell afterwards
report     the verdict on every request and the table
command    all of it together
"""
