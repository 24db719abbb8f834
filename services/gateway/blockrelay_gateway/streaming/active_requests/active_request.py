"""An active request: one copy of its token log for all its readers at this gateway. Data.

It is a hint, like everything outside the log: another gateway can read the same request from its record. It lives from
its submission (or the first reader that resumes it) to the terminal entry or to its last reader, whichever is later.
"""

import asyncio
import time
from dataclasses import dataclass, field

from blockrelay.protocol.encoding.request_ids import Prefix, public_id
from blockrelay.protocol.messages import EndEntry, LogEntry, RequestBody
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_gateway.streaming.active_requests.acceptance import Acceptance


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """One request with its log entries so far: TokenEntry 1..n, then one EndEntry.

    Times are seconds of the monotonic clock, except `created` (Unix seconds).
    """

    acceptance: Acceptance
    params: SamplingParams
    created: int
    cell: str = ""  # the cell's name
    owned: bool = True  # accepted by this gateway, which counts it
    started: float = field(default_factory=time.monotonic)  # the time at which this gateway began to follow it
    entries: list[LogEntry] = field(default_factory=list[LogEntry])
    end: EndEntry | None = None  # the last of `entries`, once it is there
    numerics: str = ""  # numerics ids of the workers that computed its tokens so far
    readers: int = 0  # clients of this gateway that read it
    first: float | None = None  # the time of token 1
    last_entry_at: float = field(default_factory=time.monotonic)  # the time of the last entry
    checked: float = field(default_factory=time.monotonic)  # the time of the last look at the record
    events: set[asyncio.Event] = field(default_factory=set[asyncio.Event])  # set at each new entry: they wake readers
    grace: asyncio.TimerHandle | None = None  # the end of its grace period, while it has no reader
    sought: float = float("-inf")  # the last time that a client asked for it; it may become a reader
    leaving: bool = False  # it has no reader, and FINISH is under way or done

    @property
    def id(self) -> str:
        """The request id in its cell."""
        return self.acceptance.request_id

    def public_id(self, prefix: Prefix = "req") -> str:
        """The id that clients use. With another prefix than `req`, it names all choices of one body together."""
        own = self.id if prefix == "req" else self.body.group or self.id
        return public_id(own, self.cell, prefix)

    @property
    def body(self) -> RequestBody:
        """The request as its record has it: the prompt and everything that decides the answer."""
        return self.acceptance.body

    @property
    def tenant(self) -> str:
        """The tenant's name; "" if API keys are off."""
        return self.acceptance.tenant

    @property
    def tokens(self) -> int:
        """The number of tokens in `entries`; more may be committed that this gateway has not read yet."""
        return len(self.entries) - (self.end is not None)
