"""Devices and the network between their hosts, as `plan --devices FILE` and `plan what-if --add` describe them."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import UsageError
from blockrelay.protocol.plan import DEVICES
from blockrelay.quantities import parse_quantity

#: Most devices in a file. More are a mistake: a cell has fewer workers.
MAX_DEVICES = 1024
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A CPU or GPU that computes stages, one step at a time.

    Its speed is that of its class in a profile times `speed`. If the profile lacks the class, the speed is estimated
    from the bytes and operations per second.
    """

    id: str
    device_class: str
    """A class of the profile: `CPU`, `GPU` or a name that a user chose."""
    host: str
    memory_bytes: int | None = None
    """Memory for weights and KV pages; None: as much as is needed."""
    speed: float = 1.0
    """Factor on the speed of the class; 2 is twice as fast."""
    bytes_per_second: float | None = None
    """Rate of reading weights from memory; None if unknown."""
    operations_per_second: float | None = None
    """Rate of arithmetic; None if unknown, and then reading the weights is all that a step takes."""

    @property
    def is_described(self) -> bool:
        """True if the device has figures of its own, from which its speed can be estimated."""
        return self.bytes_per_second is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLink:
    """The time that the network between two hosts adds to a hop between stages, in either direction."""

    between: tuple[str, str]
    """The two hosts."""
    seconds: float
    """Seconds of each message."""
    seconds_per_byte: float
    """Seconds of each byte of a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """At least one device, with distinct ids, and the links between their hosts (`checked`)."""

    devices: tuple[Device, ...]
    links: tuple[DeviceLink, ...] = ()

    def device(self, device_id: str) -> Device:
        """Returns the device with this id. Raises UsageError if there is none."""
        for device in self.devices:
            if device.id == device_id:
                return device
        raise UsageError(f"there is no device {device_id}: there are {', '.join(d.id for d in self.devices)}")

    def link(self, a: str, b: str) -> DeviceLink | None:
        """Returns the link between the hosts `a` and `b`; None if the file has none."""
        return next((link for link in self.links if set(link.between) == {a, b}), None)

    def with_device(self, device: Device) -> "Fleet":
        """Returns the fleet with one more device. Raises UsageError if its id is taken or MAX_DEVICES are there."""
        return checked(Fleet(devices=(*self.devices, device), links=self.links), "devices")

    def without_host(self, host: str) -> "Fleet":
        """Returns the fleet without the devices of `host`. Raises UsageError if it has none, or has all of them."""
        left = tuple(device for device in self.devices if device.host != host)
        if len(left) == len(self.devices):
            hosts = ", ".join(dict.fromkeys(device.host for device in self.devices))
            raise UsageError(f"there is no host {host}: there are {hosts}")
        if not left:
            raise UsageError(f"without host {host} no device is left")
        return Fleet(devices=left, links=tuple(link for link in self.links if host not in link.between))


def decode_fleet(content: bytes, where: str) -> Fleet:
    """Decodes the JSON file of `plan --devices`: the lists `devices` and, if there are links, `links`.

    `where` is the file's name for messages. Raises UsageError, which names the file and the field.
    """
    fields = Fields.parse(content, where, UsageError)
    devices = fields.read_list("devices", _device)
    links = fields.read_list("links", _link) if fields.has("links") else ()
    fields.done()
    return checked(Fleet(devices=devices, links=links), where)


def checked(fleet: Fleet, where: str) -> Fleet:
    """Returns `fleet`. Raises UsageError, which begins with `where`, unless it has 1 to MAX_DEVICES devices with
    distinct ids and its links are between hosts of these."""
    if not 1 <= len(fleet.devices) <= MAX_DEVICES:
        raise UsageError(f"{where}: {len(fleet.devices)} devices; there must be 1 to {MAX_DEVICES}")
    repeated = [name for name, count in Counter(device.id for device in fleet.devices).items() if count > 1]
    if repeated:
        raise UsageError(f"{where}: device {repeated[0]} is there twice")
    hosts = {device.host for device in fleet.devices}
    for index, link in enumerate(fleet.links):
        if unknown := [host for host in link.between if host not in hosts]:
            raise UsageError(f"{where}: links[{index}]: no device is on host {unknown[0]}")
    return fleet


def parse_described(text: str, known: Sequence[Device]) -> Device:
    """Returns the device that `gpu:24GB:900GB/s[:80T/s]` describes: class, memory, bytes and operations per second.

    It gets the first id that `known` devices leave free (`gpu0`) and a host of its own. Without operations per second,
    reading its weights is all that a step takes. Raises UsageError that says what is wrong.
    """
    parts = text.split(":")
    if len(parts) not in (3, 4) or not parts[0]:
        raise UsageError(f"--add takes CLASS:MEMORY:BYTES/s[:OPERATIONS/s], such as gpu:24GB:900GB/s, not {text!r}")
    name = parts[0].lower()
    taken = {device.id for device in known}
    number = next(n for n in range(len(taken) + 1) if f"{name}{n}" not in taken)
    return Device(
        id=f"{name}{number}",
        device_class=parts[0].upper() if name in DEVICES else parts[0],
        host=f"new-{name}{number}",
        memory_bytes=int(_quantity(parts[1], "B")),
        bytes_per_second=_quantity(parts[2], "B/s"),
        operations_per_second=_quantity(parts[3], "/s") if len(parts) == 4 else None,
    )


def _quantity(text: str, unit: str) -> float:
    value = parse_quantity(text, unit, where="--add")
    if value <= 0:
        raise UsageError(f"--add: {text} must be above 0")
    return value


def _name(fields: Fields, field: str) -> str:
    name = fields.text(field)
    if not _NAME.fullmatch(name):
        fields.fail(f"{field} must be letters, digits and -_.:, 64 at most, not {name[:80]!r}")
    return name


def _device(fields: Fields) -> Device:
    return Device(
        id=_name(fields, "id"),
        device_class=_name(fields, "class"),
        host=_name(fields, "host") if fields.has("host") else "localhost",
        memory_bytes=fields.integer("memory_bytes", minimum=1) if fields.has("memory_bytes") else None,
        speed=fields.positive("speed") if fields.has("speed") else 1.0,
        bytes_per_second=fields.positive("bytes_per_second") if fields.has("bytes_per_second") else None,
        operations_per_second=fields.positive("operations_per_second") if fields.has("operations_per_second") else None,
    )


def _link(fields: Fields) -> DeviceLink:
    between = fields.texts("between")
    if len(set(between)) != 2 or len(between) != 2:
        fields.fail("between must be a list of two hosts")
    return DeviceLink(
        between=(between[0], between[1]),
        seconds=fields.positive("seconds", zero=True),
        seconds_per_byte=fields.positive("seconds_per_byte", zero=True),
    )
