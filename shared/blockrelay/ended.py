"""Reading requests that may have ended: what the record and the log of one hold together.

With its end a body moves from the record into the terminal entry, and a short log is packed into that entry, which then
moves into the record: little is kept of what is over (`prelude.lua`).
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import count as naturals
from itertools import takewhile
from typing import cast

from blockrelay import wire
from blockrelay.messages import LogEntry, RequestBody, decode_log_entry
from blockrelay.wire_values import reading

Log = Sequence[tuple[bytes, Mapping[bytes, bytes]]]


def whole_log(record: Mapping[bytes, bytes], log: Log) -> Log:
    """All entries of a request's log: those of its stream, or what its record has in their place.

    `record` and `log` of one moment, or `log` the later one.
    """
    if log or b"0" not in record:
        return log
    with reading("the log in a record"):
        pieces = takewhile(lambda piece: piece is not None, (record.get(b"%d" % at) for at in naturals()))
        fields = wire.unpack_fields(b"".join(cast(Iterable[bytes], pieces)))
        return [(b"%d-0" % (int(record[b"n"]) + 1), fields)]


def body_of(record: Mapping[bytes, bytes], log: Log) -> RequestBody:
    """The body of a request: with its end it moves from the record into the last entry of the log.

    `log`: at least that entry. Raises WireError when it is nowhere.
    """
    with reading("a request body"):
        return RequestBody.decode((record if b"body" in record else whole_log(record, log)[-1][1])[b"body"])


def decode_log(log: Log) -> list[LogEntry]:
    """The stream entries of `log:<id>`, or some of them, as LogEntries."""
    return [entry for entry_id, fields in log for entry in decode_log_entry(entry_id, fields)]
