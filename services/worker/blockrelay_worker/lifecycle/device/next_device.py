"""Chooses another device of the host for a worker whose own cannot do its work; devices of its class come first.

A device cannot do its work when a session cannot be made, or steps fail, in all their tries (`tries.what_next`). For a
device that is lost, hangs or gives wrong numbers the worker waits instead (`device_wait`).
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
from blockrelay.protocol.plan import CPU, GPU
from blockrelay_worker.execution.loader import CPU_PROVIDER
from blockrelay_worker.execution.onnx.tries import TRIES, what_next
from blockrelay_worker.execution.process.executors import DeviceExecutors
from blockrelay_worker.lifecycle.device.claims import DeviceClaims
from blockrelay_worker.policy import LIST_DEVICES_S, LIST_POLL_S

#: Opens the device of this name and returns its executors.
Make = Callable[[str], DeviceExecutors]
#: Value of the setting `gpu_fallbacks` that stands for all devices that `blockrelay devices` lists.
AUTO = "auto"


def in_order(devices: Sequence[Mapping[str, Any]], own: str, taken: Collection[str]) -> list[str]:
    """Returns the ids of the `devices` (as `blockrelay devices --json` lists them) that may replace `own`, best first.

    Devices of its class come first, among these its provider's, then its vendor's. Excluded are devices with a
    `problem`, the cards `taken` by other workers (see `card_of`), and devices that may be such a card through another
    provider. ONNX Runtime's CPU provider replaces nothing and is not replaced. Pure.
    """
    mine = next((one for one in devices if own == one["id"] or _has_uuid(one, own)), None)
    mine = mine or {"id": own, "kind": GPU, "vendor": ""}
    if mine["kind"] == CPU:
        return []
    others = [one for one in devices if card_of(one) in taken and one is not mine]

    def free(one: Mapping[str, Any]) -> bool:
        return card_of(one) not in taken and not any(
            _provider(other) != _provider(one)
            and (not other["vendor"] or not one["vendor"] or other["vendor"] == one["vendor"])
            for other in others
        )

    usable = [one for one in devices if one["kind"] != CPU and not one["problem"] and one["id"] != mine["id"]]
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
    """Returns the name of a device's card (see `Provider.card`), equal in all processes however they number devices."""
    return str(device["uuid"] or device["id"])


def _has_uuid(device: Mapping[str, Any], name: str) -> bool:
    return name.startswith("GPU-") and str(device["uuid"] or "").startswith(name)


def _provider(device: Mapping[str, Any]) -> str:
    return str(device["id"]).partition(":")[0]


class OtherDevices:
    """The devices that may replace the own device of this process. One thread uses it at a time."""

    def __init__(self, own: str, named: str, *, python: str, claims: DeviceClaims | None = None) -> None:
        """`own`: the device of `--gpu`; `named`: the setting gpu_fallbacks, device ids with commas between or AUTO.

        `python` is the path of the Python that has the packages of devices.
        """
        self._own, self._named, self._python = own, named, python
        self._claims = claims or DeviceClaims()
        #: Devices that were not tried yet; None before they were listed.
        self._left: deque[str] | None = None
        self._over = False
        #: The card of another device that this process uses; "" for its own.
        self._card = ""

    def begins(self, executors: DeviceExecutors) -> None:
        """Takes a shared lock on the device that the process has opened at its start, unless that is the CPU."""
        if executors.name != CPU_PROVIDER:
            self._claims.share(executors.card)

    def serves(self, executors: DeviceExecutors) -> None:
        """Notes that a stage is ready. On the own device all other devices may then be tried again, should it fail."""
        if executors.name == executors.own:
            self._left, self._over = None, False

    def are_left(self, should_end: Callable[[], bool]) -> bool:
        """Returns whether a device was not tried yet. The first call lists the devices, until `should_end` is True.

        After `take_next` found none, it is False until a stage is ready on the own device (`serves`).
        """
        if self._left is None and not self._over:
            self._left = deque(self._candidates(should_end))
        return bool(self._left) and not self._over

    def opened(self, make: Make, should_end: Callable[[], bool] = lambda: False) -> DeviceExecutors:
        """Opens the own device, or another one if that cannot do its work, and returns its executors.

        Others are tried only after DeviceFailed with a reason in `tries.CANNOT`, until `should_end` returns True. Any
        other error of `make` for the own device is raised at once; that DeviceFailed, if no other device can be opened.
        """
        try:
            executors = make(self._own)
        except DeviceFailed as failed:
            if what_next(failed.reason, (), TRIES, others=self.are_left(should_end)) != "next_device":
                raise
            get().warning("DEVICE_NOT_TAKEN", device=self._own, error=str(failed))
            executors = self._first(make, should_end, refuse=DeviceExecutors.close)
            if executors is None:
                raise
            get().warning("DEVICE_CHANGED", before=self._own, now=executors.name, reason="it could not be opened")
        self.begins(executors)
        return executors

    def _first(
        self, use: Make, should_end: Callable[[], bool], refuse: Callable[[DeviceExecutors], None]
    ) -> DeviceExecutors | None:
        """Returns the executors on the first untried device that `use` can open and that no other worker has.

        `refuse` gets the executors on a device that another worker has. None if no device is left.
        """
        while self._left and not should_end():
            device = self._left.popleft()
            self._give_back()
            try:
                executors = use(device)
            except BlockrelayError as error:
                get().warning("DEVICE_NOT_TAKEN", device=device, error=str(error))
                continue
            if device == CPU_PROVIDER or self._claims.take(executors.card):
                return executors
            get().warning("DEVICE_NOT_TAKEN", device=device, error="another worker has it")
            refuse(executors)
        return None

    def take_next(self, executors: DeviceExecutors, should_end: Callable[[], bool]) -> bool:
        """Moves `executors` to the next device that can be opened, if theirs cannot do its work; else does nothing.

        Where no device is left they go back to their own. Returns True if they have moved to another device.
        """
        why = executors.unable
        if not why:
            return False
        before = executors.name
        if self.are_left(should_end) and self._moved(executors, should_end):
            get().warning("DEVICE_CHANGED", before=before, now=executors.name, reason=why)
            return True
        self._give_back()
        self._left, self._over = None, True
        executors.go_home()
        if executors.name != before:
            get().warning("DEVICE_CHANGED", before=before, now=executors.name, reason=why)
        return False

    def _moved(self, executors: DeviceExecutors, should_end: Callable[[], bool]) -> bool:
        """Moves `executors` to the first untried device that works and that no other worker has; False if none does."""

        def move(device: str) -> DeviceExecutors:
            executors.move_to(device)
            return executors

        if self._first(move, should_end, refuse=lambda _: None) is None:
            return False
        self._card = "" if executors.name == CPU_PROVIDER else executors.card
        return True

    def _give_back(self) -> None:
        if self._card:
            self._claims.give_back(self._card)
            self._card = ""

    def _candidates(self, should_end: Callable[[], bool]) -> Iterable[str]:
        """Returns the names of the devices to try, in order: those of the setting, or all free ones of the host."""
        if self._named != AUTO:
            return [name for part in self._named.split(",") if (name := part.strip()) and name != self._own]
        if self._own == CPU_PROVIDER or not self._claims.known:
            return []
        devices = devices_of_host(self._python, should_end)
        taken = {card for one in devices if self._claims.taken(card := card_of(one))}
        return in_order(devices, self._own, taken)


def devices_of_host(
    python: str, should_end: Callable[[], bool], *, limit_s: float = LIST_DEVICES_S
) -> list[dict[str, Any]]:
    """Returns the devices that `blockrelay devices --json` lists.

    The list is empty if the command fails, takes more than `limit_s` seconds, or `should_end` returns True first.
    """
    command = [python, "-P", "-m", "blockrelay_worker.offline.devices", "--json"]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return []
    until, output = time.monotonic() + limit_s, ""
    with process:
        while time.monotonic() < until and not should_end():
            with suppress(subprocess.TimeoutExpired):
                output, _ = process.communicate(timeout=LIST_POLL_S)
                break
        else:
            process.kill()
    try:
        return json.loads(output)["devices"] if process.returncode == 0 else []
    except (ValueError, KeyError):
        return []
