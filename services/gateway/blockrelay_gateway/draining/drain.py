"""The current phase of a gateway's end, for all parts that act on it. It belongs to the event loop."""

import asyncio

from blockrelay.errors import ServiceUnavailable
from blockrelay_gateway.draining.course import Phase

#: Reasons of /readyz while a gateway ends.
DRAINING = "the gateway is draining: what it has accepted goes on, new requests belong elsewhere"
SHUTTING_DOWN = "the gateway shuts down"
#: Code and reason with which WebSockets are closed: a new connection leads to another gateway.
RESTART_CODE, RESTART_REASON = 1012, "this gateway ends; connect again"


class GatewayEnds(ServiceUnavailable):
    """The gateway ends before the request does; the request goes on."""


class Drain:
    """The phase of the gateway. The server enters the phases in their order, and may leave some out."""

    def __init__(self) -> None:
        self.phase = Phase.SERVING
        self._has_begun, self._deaf = asyncio.Event(), asyncio.Event()

    def enter(self, phase: Phase) -> None:
        """Enters a later phase; an earlier one changes nothing."""
        self.phase = max(self.phase, phase)
        if self.phase >= Phase.LINGERING:
            self._has_begun.set()
        if self.phase >= Phase.FINISHING:
            self._deaf.set()

    @property
    def has_begun(self) -> bool:
        """True from LINGERING on: the gateway ends, because of a signal or of failed background work."""
        return self._has_begun.is_set()

    @property
    def why_not_ready(self) -> str:
        """The reason for /readyz; empty while the gateway serves."""
        if not self.has_begun:
            return ""
        return DRAINING if self.phase < Phase.CUTTING else SHUTTING_DOWN

    def time_to_leave(self) -> asyncio.Event:
        """Returns an event for a WebSocket that opens now; it is set when the WebSocket has to be closed.

        That is when the gateway begins to end. A WebSocket that opens while the gateway lingers is served until
        FINISHING: its client may have no other gateway yet, and would come back here again and again.
        """
        return self._deaf if self.has_begun else self._has_begun
