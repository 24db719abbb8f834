"""The number of a cell's protocol, `{cell}:protocol`: what its keys, records and messages mean.

It goes up with each change that services of the number before would misread. The first service of a new cell writes its
number; a cell of a lower one is upgraded by a scheduler (`blockrelay_scheduler.upgrade`), on one of a higher one nobody
starts. Every record says the number under which it was written (`v`). Release 0.1.0, protocol 1, wrote none.
"""

PROTOCOL = 3
#: As it stands in Redis.
ENCODED = b"%d" % PROTOCOL
