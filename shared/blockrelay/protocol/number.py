"""The number of a cell's protocol, `{cell}:protocol`: what its keys, records and messages mean.

It goes up with each change that services of the number before would misread. The first service of a cell writes its
number; who comes with another is told so and does not start. Every record says the number under which it was written
(`v`); one without it is of protocol 1, which is that of release 0.1.0 and is read as it is.
"""

PROTOCOL = 2
