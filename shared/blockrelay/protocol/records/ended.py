"""Reads the body, the notes and the log of a request, whether it runs or has ended.

To save memory, the end of a request moves its long fields from the record into the terminal entry of the log. A
short log is packed into that entry, and the entry moves into the record (`transitions/lua/lib/requests/ended.lua`).
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import count as naturals
from itertools import takewhile
from typing import cast

from blockrelay.protocol.encoding import codec
from blockrelay.protocol.encoding.checks import reading
from blockrelay.protocol.messages import LogEntry, RequestBody, decode_log_entry

#: Stream entries of `log:<id>`: entry id and fields.
Log = Sequence[tuple[bytes, Mapping[bytes, bytes]]]


def whole_log(record: Mapping[bytes, bytes], log: Log) -> Log:
    """Returns all entries of a request's log: those of its stream, or the one that its record has in their place.

    `record` and `log` must be read at the same moment, or `log` after `record`. Raises WireError.
    """
    if log or b"0" not in record:
        return log
    with reading("the log in a record"):
        pieces = takewhile(lambda piece: piece is not None, (record.get(b"%d" % at) for at in naturals()))
        fields = codec.unpack_fields(b"".join(cast(Iterable[bytes], pieces)))
        return [(b"%d-0" % (int(record[b"committed"]) + 1), fields)]


def whole_record(record: Mapping[bytes, bytes], log: Log) -> Mapping[bytes, bytes]:
    """Returns the record with the fields that the end of the request moved into the last entry of the log.

    `log` needs to have at least that entry. Raises WireError when neither has a body.
    """
    if b"body" in record:
        return record
    with reading("the body in the last log entry"):
        terminal = whole_log(record, log)[-1][1]
        return {
            **record,
            b"body": terminal[b"body"],
            **{name: terminal.get(name, b"") for name in (b"notes", b"ran", b"numerics")},
        }


def body_of(record: Mapping[bytes, bytes], log: Log) -> RequestBody:
    """Returns the body of a request, running or ended. `log` and errors as for `whole_record`."""
    return RequestBody.decode(whole_record(record, log)[b"body"])


def decode_log(log: Log) -> list[LogEntry]:
    """Returns the LogEntries in stream entries of `log:<id>`, all or some of them. Raises WireError."""
    return [entry for entry_id, fields in log for entry in decode_log_entry(entry_id, fields)]
