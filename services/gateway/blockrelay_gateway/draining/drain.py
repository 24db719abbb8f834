"""How far the end of this gateway has come, for all who act on it. Belongs to the event loop."""

import asyncio

from blockrelay.errors import ServiceUnavailable
from blockrelay_gateway.draining.course import Phase

#: Why a gateway that ends is not ready.
DRAINING = "the gateway is draining: what it has accepted goes on, new requests belong elsewhere"
SHUTTING_DOWN = "the gateway shuts down"
#: WebSockets are closed with this code and reason: another connection, which leads elsewhere, is served.
RESTART_CODE, RESTART_REASON = 1012, "this gateway ends; connect again"


class GatewayEnds(ServiceUnavailable):
    """This gateway ends before the request does, which goes on."""


class Drain:
    """The phase that the gateway is in. The server enters the phases, each at most once and in their order."""

    def __init__(self) -> None:
        self.phase = Phase.SERVING
        self._begun, self._deaf = asyncio.Event(), asyncio.Event()

    def enter(self, phase: Phase) -> None:
        """A later phase begins; an earlier one changes nothing."""
        self.phase = max(self.phase, phase)
        if self.phase >= Phase.LINGERING:
            self._begun.set()
        if self.phase >= Phase.FINISHING:
            self._deaf.set()

    @property
    def begun(self) -> bool:
        """Whether the gateway was told to end."""
        return self._begun.is_set()

    @property
    def why_not_ready(self) -> str:
        """Empty while the gateway serves."""
        if not self.begun:
            return ""
        return DRAINING if self.phase < Phase.CUTTING else SHUTTING_DOWN

    def time_to_leave(self) -> asyncio.Event:
        """An event for a WebSocket that is opened now: set when it has to be closed.

        One that is opened while the gateway lingers is served until nobody listens: its client may have no other
        gateway yet, and would come back here again and again.
        """
        return self._deaf if self.begun else self._begun
