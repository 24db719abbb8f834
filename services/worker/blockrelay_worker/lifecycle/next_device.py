"""The device that a worker goes on with when its own cannot do its work: others of its class on the host come first.

What cannot be done is a session that is not made, or steps that fail, in all their tries (`tries.what_next`). A device
that is lost, hangs or gives wrong numbers is waited for instead.
"""

import json
import subprocess
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from blockrelay.errors import BlockrelayError, DeviceFailed
from blockrelay.observability.logs import get
from blockrelay_worker.execution.loader import CPU
from blockrelay_worker.execution.onnx.tries import TRIES, what_next
from blockrelay_worker.execution.process.executors import DeviceExecutors
from blockrelay_worker.lifecycle.device_claims import DeviceClaims

#: Executors on the device of this name.
Make = Callable[[str], DeviceExecutors]
#: As a value of the setting `gpu_fallbacks`: all that `blockrelay devices` finds.
AUTO = "auto"
#: How long the devices of this host may take to be found, and how often it is looked whether they are. Seconds.
FIND_S, LOOK_S = 60.0, 0.05


def in_order(found: Sequence[Mapping[str, Any]], own: str, taken: Collection[str]) -> list[str]:
    """Ids of the devices, of all that `blockrelay devices` has `found`, that stand in for `own`, best first. Pure.

    Those of its class come first, of these its provider's, then its vendor's. None that another worker has `taken` (by
    card, see `card_of`), nor one that may be such a card by another provider. ONNX Runtime's CPU provider stands in for
    nothing, and nothing for it.
    """
    mine = next((one for one in found if own == one["id"] or _has_uuid(one, own)), None)
    mine = mine or {"id": own, "kind": "gpu", "vendor": ""}
    if mine["kind"] == "cpu":
        return []
    others = [one for one in found if card_of(one) in taken and one is not mine]

    def free(one: Mapping[str, Any]) -> bool:
        return card_of(one) not in taken and not any(
            _provider(other) != _provider(one)
            and (not other["vendor"] or not one["vendor"] or other["vendor"] == one["vendor"])
            for other in others
        )

    usable = [one for one in found if one["kind"] != "cpu" and not one["problem"] and one["id"] != mine["id"]]
    return [
        str(one["id"])
        for one in sorted(
            filter(free, usable),
            key=lambda one: (
                one["kind"] != mine["kind"],
                _provider(one) != _provider(mine),
                one["vendor"] != mine["vendor"],
            ),
        )
    ]


def card_of(device: Mapping[str, Any]) -> str:
    """As `Provider.card` has it: what is the same however a process counts its devices."""
    return str(device["uuid"] or device["id"])


def _has_uuid(device: Mapping[str, Any], name: str) -> bool:
    return name.startswith("GPU-") and str(device["uuid"] or "").startswith(name)


def _provider(device: Mapping[str, Any]) -> str:
    return str(device["id"]).partition(":")[0]


class OtherDevices:
    """Those of one process. One thread uses it at a time."""

    def __init__(self, own: str, named: str, *, python: str, claims: DeviceClaims | None = None) -> None:
        """`own`: the device of `--gpu`, `named`: the setting gpu_fallbacks. `python` has the packages of devices."""
        self._own, self._named, self._python = own, named, python
        self._claims = claims or DeviceClaims()
        self._left: deque[str] | None = None
        self._over = False
        self._card = ""  # of another device that this process has

    def begins(self, executors: DeviceExecutors) -> None:
        """The process has opened the device that it was started with."""
        if executors.name != CPU:
            self._claims.share(executors.card)

    def serves(self, executors: DeviceExecutors) -> None:
        """It has a stage that is ready. At home again it may leave again."""
        if executors.name == executors.own:
            self._left, self._over = None, False

    def are_left(self, asked: Callable[[], bool]) -> bool:
        """Whether there is one that was not tried; False once all were. Looks no more when `asked` to end."""
        if self._left is None and not self._over:
            self._left = deque(self._found(asked))
        return bool(self._left) and not self._over

    def opened(self, make: Make, asked: Callable[[], bool] = lambda: False) -> DeviceExecutors:
        """Executors on the process' own device, or on the next one, where that cannot be opened now. Raises what `make`
        raises of its own device where no other helps."""
        try:
            executors = make(self._own)
        except DeviceFailed as failed:
            if what_next(failed.reason, (), TRIES, others=self.are_left(asked)) != "next_device":
                raise
            get().warning("DEVICE_NOT_TAKEN", device=self._own, error=str(failed))
            executors = self._first(make, asked)
            if executors is None:
                raise
        self.begins(executors)
        return executors

    def _first(self, make: Make, asked: Callable[[], bool]) -> DeviceExecutors | None:
        while self._left and not asked():
            device = self._left.popleft()
            try:
                executors = make(device)
            except BlockrelayError as error:
                get().warning("DEVICE_NOT_TAKEN", device=device, error=str(error))
                continue
            if device == CPU or self._claims.take(executors.card):
                get().warning("DEVICE_CHANGED", before=self._own, now=device, reason="it was not opened")
                return executors
            get().warning("DEVICE_NOT_TAKEN", device=device, error="another worker has it")
            executors.close()
        return None

    def take_next(self, executors: DeviceExecutors, asked: Callable[[], bool]) -> bool:
        """Have `executors` move on, if their device cannot do its work: to the next one that can be opened, or back to
        their own where none is left. Whether they have another device now."""
        why = executors.unable
        if not why:
            return False
        before = executors.name
        if self.are_left(asked) and self._moved(executors, asked):
            get().warning("DEVICE_CHANGED", before=before, now=executors.name, reason=why)
            return True
        self._give_back()
        self._left, self._over = None, True
        executors.go_home()
        if executors.name != before:
            get().warning("DEVICE_CHANGED", before=before, now=executors.name, reason=why)
        return False

    def _moved(self, executors: DeviceExecutors, asked: Callable[[], bool]) -> bool:
        while self._left and not asked():
            device = self._left.popleft()
            self._give_back()
            try:
                executors.move_to(device)
            except BlockrelayError as error:
                get().warning("DEVICE_NOT_TAKEN", device=device, error=str(error))
                continue
            if device == CPU or self._claims.take(executors.card):
                self._card = "" if device == CPU else executors.card
                return True
            get().warning("DEVICE_NOT_TAKEN", device=device, error="another worker has it")
        return False

    def _give_back(self) -> None:
        if self._card:
            self._claims.give_back(self._card)
            self._card = ""

    def _found(self, asked: Callable[[], bool]) -> Iterable[str]:
        if self._named != AUTO:
            return [name for part in self._named.split(",") if (name := part.strip()) and name != self._own]
        if self._own == CPU or not self._claims.known:
            return []
        found = devices_of_host(self._python, asked)
        taken = {card for one in found if self._claims.taken(card := card_of(one))}
        return in_order(found, self._own, taken)


def devices_of_host(python: str, asked: Callable[[], bool], *, limit_s: float = FIND_S) -> list[dict[str, Any]]:
    """What `blockrelay devices` finds; nothing where it fails, takes too long, or this process is `asked` to end."""
    command = [python, "-P", "-m", "blockrelay_worker.offline.devices", "--json"]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return []
    until, said = time.monotonic() + limit_s, ""
    with process:
        while time.monotonic() < until and not asked():
            with suppress(subprocess.TimeoutExpired):
                said, _ = process.communicate(timeout=LOOK_S)
                break
        else:
            process.kill()
    try:
        return json.loads(said)["devices"] if process.returncode == 0 else []
    except (ValueError, KeyError):
        return []
