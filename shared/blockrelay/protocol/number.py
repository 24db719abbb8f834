"""The protocol number of a cell, in the key `{cell}:protocol`.

It goes up with each change of keys, records or messages that older services would misread. A release speaks its own
number and, from the second release on, the number before. Its services use the number of the cell, so that two
releases work side by side. When no service speaks only the lower number, a scheduler raises the cell's
(`blockrelay_scheduler.upgrade`). A service does not start on a cell whose number it does not speak.

Each record has the number under which it was written, in its field `v`.
"""

#: The number of a new cell, and the highest that this release speaks.
PROTOCOL = 4
#: The lowest that this release speaks. No release wrote the number before 4; the release of 5 speaks 4 too.
LOWEST_PROTOCOL = 4
#: The numbers that this release speaks, as text for error messages.
NUMBERS = f"{LOWEST_PROTOCOL} to {PROTOCOL}" if LOWEST_PROTOCOL < PROTOCOL else str(PROTOCOL)


def is_spoken(number: int) -> bool:
    """Returns whether this release speaks protocol `number`."""
    return LOWEST_PROTOCOL <= number <= PROTOCOL


def number_of(value: bytes | None) -> int:
    """Returns the protocol number in the field of a record or service; 0 if `value` is None or no number."""
    return int(value) if value and value.isdigit() else 0
