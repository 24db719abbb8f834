"""The number of a cell's protocol, `{cell}:protocol`: what its keys, records and messages mean.

It goes up with each change that services of the number before would misread. A release speaks its own number and, from
the second one on, the number before. Its services do in a cell what the number there says, so that services of two
releases work side by side. When none is left that speaks the lower number alone, a scheduler raises it
(`blockrelay_scheduler.upgrade`), and what the higher one brings begins. Services start on no cell of another number.

Every record says the number under which it was written (`v`).
"""

#: The number of a new cell, and the highest that this release speaks.
PROTOCOL = 4
#: The lowest that this release speaks. No release wrote the number before 4; the release of 5 speaks 4 too.
LOWEST_PROTOCOL = 4
#: The numbers that this release speaks, for messages.
NUMBERS = f"{LOWEST_PROTOCOL} to {PROTOCOL}" if LOWEST_PROTOCOL < PROTOCOL else str(PROTOCOL)


def is_spoken(number: int) -> bool:
    """Whether this release speaks protocol `number`."""
    return LOWEST_PROTOCOL <= number <= PROTOCOL


def number_of(found: bytes | None) -> int:
    """The number in a record (`v`) or of a service; 0 where none is written."""
    return int(found) if found and found.isdigit() else 0
