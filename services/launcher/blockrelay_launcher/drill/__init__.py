"""`blockrelay drill`: a system under load whose processes are killed at random; every answer is compared.

asks      random requests, and what each gives alone (in a process of its own, before the load)
system    the system to be hurt: `blockrelay up` with several gateways, and which process plays which role
load      clients: streams, background requests, cancelled ones, tensor sessions
kills     who is killed when, and whom it concerned
report    the verdict on every request and the table
command   all of it together
"""
