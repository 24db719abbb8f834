"""Reading requests that may have ended: what the record and the log of one hold together.

With its end the body and the notes of a request move from the record into the terminal entry, and a short log is packed
into that entry, which then moves into the record: little is kept of what is over
(`transitions/lua/lib/requests/ended.lua`).
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import count as naturals
from itertools import takewhile
from typing import cast

from blockrelay.protocol.encoding import codec
from blockrelay.protocol.encoding.checks import reading
from blockrelay.protocol.messages import LogEntry, RequestBody, decode_log_entry

Log = Sequence[tuple[bytes, Mapping[bytes, bytes]]]


def whole_log(record: Mapping[bytes, bytes], log: Log) -> Log:
    """All entries of a request's log: those of its stream, or what its record has in their place.

    `record` and `log` of one moment, or `log` the later one.
    """
    if log or b"0" not in record:
        return log
    with reading("the log in a record"):
        pieces = takewhile(lambda piece: piece is not None, (record.get(b"%d" % at) for at in naturals()))
        fields = codec.unpack_fields(b"".join(cast(Iterable[bytes], pieces)))
        return [(b"%d-0" % (int(record[b"committed"]) + 1), fields)]


def whole_record(record: Mapping[bytes, bytes], log: Log) -> Mapping[bytes, bytes]:
    """The record with the body and the notes that its end has moved into the last entry of the log.

    `log`: at least that entry. Raises WireError when there is no body anywhere.
    """
    if b"body" in record:
        return record
    with reading("what an end has moved"):
        said = whole_log(record, log)[-1][1]
        return {**record, b"body": said[b"body"], b"notes": said.get(b"notes", b"")}


def body_of(record: Mapping[bytes, bytes], log: Log) -> RequestBody:
    """The body of a request, running or ended. `log` and errors as `whole_record`."""
    return RequestBody.decode(whole_record(record, log)[b"body"])


def decode_log(log: Log) -> list[LogEntry]:
    """The stream entries of `log:<id>`, or some of them, as LogEntries."""
    return [entry for entry_id, fields in log for entry in decode_log_entry(entry_id, fields)]
