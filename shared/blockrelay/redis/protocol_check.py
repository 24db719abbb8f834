"""Whether a cell speaks our protocol."""

from contextlib import suppress

import redis

from blockrelay import __version__
from blockrelay.errors import RedisFull, UsageError
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.number import PROTOCOL


def check_protocol(client: redis.Redis, keys: Keys, *, join: bool) -> None:
    """Raise UsageError unless the cell speaks our protocol, or none yet; with `join` it speaks ours from then on."""
    found = client.get(keys.protocol)
    if found is None and join:
        with suppress(RedisFull):  # written by a service that starts when there is room
            client.set(keys.protocol, PROTOCOL, nx=True)
        found = client.get(keys.protocol)
    number = int(found) if isinstance(found, bytes) and found.isdigit() else found
    if number not in (PROTOCOL, None):
        raise UsageError(
            f"the cell {keys.cell!r} speaks protocol {number}, and Blockrelay {__version__} speaks {PROTOCOL}: "
            "run the release that its other services are of, or use another cell (BLOCKRELAY_CELL)"
        )
