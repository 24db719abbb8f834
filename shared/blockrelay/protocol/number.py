"""The number of a cell's protocol, `{cell}:protocol`: what its keys, records and messages mean.

It goes up with each change that services of the number before would misread. A service speaks two numbers, its own and
the one before it, and does in a cell what the number there says: services of two releases work side by side. When none
is left that speaks the lower one alone, a scheduler raises the number, and what the higher one brings begins. A cell of
a still lower number is upgraded by a scheduler (`blockrelay_scheduler.upgrade`), on one of a higher one nobody starts.

Every record says the number under which it was written (`v`). Release 0.1.0, protocol 1, wrote none.
"""

#: The number of a new cell, and the highest that this release speaks.
PROTOCOL = 4
#: The lowest that it speaks.
LOWEST_PROTOCOL = 3
#: The first number whose services all know of several cells (scripts ACCEPT and MOVE).
CELLS_PROTOCOL = 4
#: The first number whose services all know that the first entry of a token log names the numerics id (COMMIT): those of
#: the number before would pack it as log probabilities.
NUMERICS_IN_LOG_PROTOCOL = 4
#: As people are told.
NUMBERS = f"{LOWEST_PROTOCOL} to {PROTOCOL}"


def is_spoken(number: int) -> bool:
    """Whether this release speaks it."""
    return LOWEST_PROTOCOL <= number <= PROTOCOL


def number_of(found: bytes | None) -> int:
    """The number in a record (`v`) or of a gateway; those of release 0.1.0 have none."""
    return int(found) if found and found.isdigit() else 1
