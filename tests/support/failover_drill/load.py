"""Clients of the drill that count what a failover took back of what they were told."""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from blockrelay_launcher.client.resuming import Refused
from blockrelay_launcher.drill.clients import DrillLoad, RequestRecord, name_choices

#: A gateway that follows a forgotten request accepts it again sooner than this. Seconds.
GONE_S = 30.0


class Gone(Exception):
    """Nobody knows a request any more that was accepted without a key."""


@dataclass(slots=True)
class FailoverLoad(DrillLoad):
    """Half of the background requests have no key. `gone`: those that were accepted and then forgotten for good, which
    are not among those `seen`; `begun_again`: sessions that did not have a step any more which they had accepted;
    `cancelled`: requests whose DELETE was answered so."""

    gone: list[str] = field(default_factory=list[str], init=False)
    begun_again: list[str] = field(default_factory=list[str], init=False)
    cancelled: list[str] = field(default_factory=list[str], init=False)

    def no_longer_cancelled(self) -> list[str]:
        """Of those, when nothing is under way any more."""
        rng = Random(0)
        states = {name: self._state(name, rng) for name in self.cancelled}
        return [f"{name} was cancelled and is {state}" for name, state in states.items() if state != "cancelled"]

    def _state(self, request_id: str, rng: Random) -> str:
        try:
            return self._ask("GET", f"/v1/requests/{request_id}", rng).json()["status"]
        except Refused as error:
            if error.status != 404:
                raise
            return "forgotten"

    def _delete(self, seen: RequestRecord, rng: Random) -> None:
        """What nobody knows any more cannot be cancelled: its stream goes on, and brings it back with its key."""
        began = time.monotonic()

        def missing() -> None:
            if time.monotonic() - began > GONE_S:
                raise Gone

        with suppress(Gone):
            answer = self._ask("DELETE", f"/v1/requests/{seen.request_id}", rng, missing=missing)
            if answer.json().get("status") == "cancelled":
                self.cancelled.append(seen.request_id)

    def _background(self, choices: Sequence[RequestRecord], body: dict[str, Any], key: str, rng: Random) -> None:
        if rng.random() < 0.5:
            DrillLoad._background(self, choices, body, key, rng)
            return
        path = self.requests[choices[0].number].path
        answer = self._ask("POST", path, rng, {**body, "background": True})
        name_choices(choices, json.loads(answer.content)["id"])
        for one in choices:
            self._poll_keyless(one, rng)

    def _poll_keyless(self, seen: RequestRecord, rng: Random) -> None:
        """Until it has ended, or is gone for good."""
        asked = 0
        unknown_since = time.monotonic()

        def missing() -> None:
            nonlocal asked, unknown_since
            if len(seen.events) != asked:  # it was known in between
                asked, unknown_since = len(seen.events), time.monotonic()
            if time.monotonic() - unknown_since > GONE_S:
                raise Gone

        try:
            self._poll(seen, rng, missing)
        except Gone:
            with self._lock:
                self.gone.append(seen.request_id)
                self.seen[:] = [one for one in self.seen if one is not seen]

    def _session(self, seen: RequestRecord, key: str, rng: Random) -> None:
        while True:
            try:
                DrillLoad._session(self, seen, key, rng)
                return
            except Refused as error:
                if error.status != 409:
                    raise
                self.begun_again.append(f"{key}: {error}")
                key = f"drill-{rng.getrandbits(96):024x}"
                seen.digests.clear()
                seen.fingerprints.clear()
