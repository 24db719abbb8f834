"""Ids of stream events: `<request>:<position>`, for several choices `<request>:<position>.<position>…`. Pure.

An id has the reader's position in each token log, so that any gateway goes on exactly behind it. Position 0 is the
opening event, one past the last token the end, and one more the closing event.
"""

import re
from collections.abc import Sequence

from blockrelay.errors import BadRequest
from blockrelay.protocol.encoding.request_ids import PUBLIC_ID, parse_id

HEADER = "Last-Event-ID"
_ID = re.compile(rf"(?:({PUBLIC_ID.pattern}):)?(?P<positions>[0-9]{{1,9}}(?:\.[0-9]{{1,9}})*)")


def event_id(request_id: str, positions: Sequence[int]) -> str:
    """The id of the event that brings a reader to `positions`, one for each choice of a request.

    `request_id` is the id that clients see, with the name of the cell if it has one.
    """
    return f"{request_id}:{'.'.join(map(str, positions))}"


def parse_event_id(text: str, request_id: str, *, param: str) -> tuple[int, ...]:
    """The positions of an event id, which may lack the request's id before them; `request_id` is the id in its cell.

    Raises BadRequest, naming the field `param`, for a text that is no event id, and for one of another request.
    """
    match = _ID.fullmatch(text)
    if not match:
        raise BadRequest(f"{param} is not an event id: send that of an event, or a position", param=param)
    if match[1] is not None and (named := parse_id(match[1])) is not None and named.request_id != request_id:
        raise BadRequest(f"{param} is an event of another request ({match[1]}, not {request_id})", param=param)
    return tuple(int(position) for position in match["positions"].split("."))


def check_choices(positions: Sequence[int] | None, choices: int, *, param: str) -> None:
    """Raises BadRequest unless there is a position for each choice; None stands for the beginning of all."""
    if positions is not None and len(positions) != choices:
        raise BadRequest(f"{param} names {len(positions)} positions; the request has {choices} choices", param=param)


def starting_after(header: str | None, names: Sequence[str], *, streamed: bool) -> tuple[int, ...] | None:
    """The positions behind which the answer to a repeated POST goes on; None: it starts at the beginning.

    `header` is the POST's Last-Event-ID, `names` are the ids of its requests in their cell. Raises BadRequest for a
    header that is no event id of the first request or has another number of positions, and for any header on a POST
    that is not `streamed`.
    """
    if header is None:
        return None
    if not streamed:
        raise BadRequest(f"{HEADER} continues a stream: send stream: true", param=HEADER)
    positions = parse_event_id(header, names[0], param=HEADER)
    check_choices(positions, len(names), param=HEADER)
    return positions
