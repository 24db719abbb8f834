"""Reads the file of `blockrelay up --topology`: the hosts, their devices and roles, and how the model is cut for them.

Every host reads the same file and starts its own services. All hosts compute the same plan from the same figures, so
that they agree without communication; the schedulers' plan is the one in force.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.errors import UsageError
from blockrelay.host.cpu import MAX_RANKS, check_threads
from blockrelay.planning.devices import decode_fleet
from blockrelay.protocol.planned_split import ANY_CPU, ANY_GPU, PlannedSplit, is_gpu, is_host_device
from blockrelay.quantities import parse_quantity
from blockrelay.typed_command import typed
from blockrelay_launcher.up_options.device_binding import HostGpu
from blockrelay_launcher.up_options.options import UpOptions
from blockrelay_launcher.up_options.plan_choice import OF_A_STRATEGY, PlanChoice
from blockrelay_launcher.up_options.yaml_file import YamlFile

#: A number, or a text of a number with its unit.
Quantity = Annotated[float, Field(gt=0, allow_inf_nan=False)] | str
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class DeviceEntry(_Strict):
    """A device of a host in the file.

    `memory`, `bytes_per_second` and `operations_per_second` may have units: 24GB, 900GB/s, 80T/s.
    """

    id: Name
    told_class: Name | None = Field(alias="class", default=None)
    gpu: Name | None = None
    """The GPU on its host, such as webgpu:0; needed if the device is a GPU and `id` is not such an id."""
    memory: Quantity | None = None
    speed: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    threads: int | None = Field(default=None, ge=1)
    bytes_per_second: Quantity | None = None
    operations_per_second: Quantity | None = None

    @property
    def device_class(self) -> str:
        """The class of the device in the file; by default GPU if it has a `gpu`, else CPU."""
        return self.told_class or ("GPU" if self.gpu else "CPU")

    @property
    def is_gpu(self) -> bool:
        """True if the device is not a CPU."""
        return self.gpu is not None or is_gpu(self.device_class)

    @property
    def real_gpu(self) -> str:
        """The value of `--gpu` for its worker; empty for a CPU, and for a GPU whose id the file does not have."""
        if self.gpu is not None or not self.is_gpu:
            return self.gpu or ""
        return self.id if is_host_device(self.id) or self.id == "cpu" else ""


class HostEntry(_Strict):
    """A host in the file: its roles and devices. `listen` and `port` are the address of its gateway.

    `tensor_parallel` processes share the stage of each of its CPU workers.
    """

    roles: tuple[Literal["worker", "gateway", "scheduler"], ...] = ("worker",)
    devices: tuple[DeviceEntry, ...] = ()
    tensor_parallel: int = Field(default=1, ge=1, le=MAX_RANKS)
    listen: str | None = None
    port: int | None = Field(default=None, ge=0, le=65535)
    model: Path | None = None


class LinkEntry(_Strict):
    """The time that the network between two hosts adds to a hop."""

    between: tuple[Name, Name]
    seconds: float = Field(ge=0, allow_inf_nan=False)
    seconds_per_byte: float = Field(ge=0, allow_inf_nan=False)


class Topology(_Strict):
    """The contents of a topology file. The `model` of a host overrides the common one."""

    model: Path | None = None
    redis: str | None = None
    payload_redis: str | None = None
    plan: Path | None = None
    strategy: str | None = None
    parts: int | None = Field(default=None, ge=1)
    memory_limit: str | None = None
    objective: Literal["latency", "throughput"] | None = None
    profile: Path | None = None
    context: int | None = Field(default=None, ge=1)
    requests: int | None = Field(default=None, ge=1)
    boundaries: str | None = None
    targets: str | None = None
    hosts: dict[Name, HostEntry]
    links: tuple[LinkEntry, ...] = ()
    _file: YamlFile | None = None

    @property
    def fleet(self) -> dict[str, Any]:
        """The devices of all hosts and their links, in the form of the file of `plan --devices`."""
        return {
            "devices": [_described(device, host) for host, entry in self.hosts.items() for device in entry.devices],
            "links": [link.model_dump() for link in self.links],
        }

    def set_file(self, file: YamlFile) -> None:
        """Sets the file from which the topology was read; `error` names it."""
        self._file = file

    def error(self, field: str, text: str) -> UsageError:
        """Returns an error that names the file, the line of the field, and the field."""
        return self._file.error((field,), text) if self._file else UsageError(f"{field}: {text}")


def read_topology(path: Path) -> Topology:
    """Reads and checks a topology file; relative paths in it become absolute from its folder.

    Raises UsageError that names the file, the line and the field.
    """
    file = YamlFile.read(path, "a topology is a mapping with hosts")
    try:
        topology = Topology.model_validate(file.data)
    except ValidationError as error:
        raise file.refusal(error) from None
    topology.set_file(file)
    _check(topology, file)
    return _resolved(topology, path.absolute().parent)


def options_for(topology: Topology, options: UpOptions) -> UpOptions:
    """Returns the options of `up` on the host that `--host` names, else the only one; the file overrides `options`.

    Raises UsageError for an unknown or missing host, for too many threads of a device, and if the model cannot be cut
    for the topology. Raises BlockFolderError for a wrong block folder.
    """
    host = options.network.host
    if host is None and len(topology.hosts) > 1:
        raise UsageError(f"--topology has several hosts: --host {' or '.join(topology.hosts)}")
    name = host or next(iter(topology.hosts))
    if name not in topology.hosts:
        raise UsageError(f"the topology has no host {name}: there is {', '.join(topology.hosts)}")
    entry = topology.hosts[name]
    model = entry.model or topology.model or options.model
    planned = _plan(topology, model)
    devices = entry.devices if "worker" in entry.roles else ()
    return replace(
        options,
        model=model,
        planned=planned,
        local={device.id: check_threads(device.threads) for device in devices},
        gpus=tuple(HostGpu(id=device.id, device=device.real_gpu) for device in _used(devices, planned)),
        topology=replace(
            options.topology,
            gateways=int("gateway" in entry.roles),
            schedulers=int("scheduler" in entry.roles),
            tensor_parallel=entry.tensor_parallel,
        ),
        network=replace(
            options.network,
            host=entry.listen,
            port=options.network.port if entry.port is None else entry.port,
            redis=topology.redis,
            payload_redis=topology.payload_redis,
        ),
    )


def _plan(topology: Topology, model: Path) -> PlannedSplit:
    """Returns the plan of the file, or of its strategy (default: auto), bound to the devices of the hosts."""
    blocks = open_block_folder(model, blocks=[]).model.blocks
    with tempfile.NamedTemporaryFile("w", suffix=".json") as devices:
        json.dump(topology.fleet, devices)
        devices.flush()
        choice = PlanChoice(
            **topology.model_dump(include={"plan", *OF_A_STRATEGY}),
            strategy=topology.strategy or (None if topology.plan else "auto"),
            devices=None if topology.plan else Path(devices.name),
        )
        try:
            planned = choice.read(model, blocks)
        except UsageError as error:
            raise topology.error(_field_of(topology, str(error)), str(error)) from None
    return _bound(planned, topology)


def _bound(planned: PlannedSplit, topology: Topology) -> PlannedSplit:
    """Returns the plan with device ids and classes of the topology.

    A class in the plan becomes all devices of this class; stages with GPUs also allow CPUs that stand in. Raises
    UsageError for devices that no host has.
    """
    known = {device.id: device for entry in topology.hosts.values() for device in entry.devices}
    gpus, cpus = ([name for name, device in known.items() if device.is_gpu is wanted] for wanted in (True, False))
    devices: list[tuple[str, ...]] = []
    classes: list[str] = []
    for ids in planned.devices:
        of_class = gpus if ANY_GPU in ids else cpus if ANY_CPU in ids else []
        named = list(dict.fromkeys([*of_class, *(name for name in ids if name not in (ANY_GPU, ANY_CPU))]))
        if ids and not named:
            raise topology.error("plan", f"it is for {ids[0]}, and no host of the topology has one")
        if strays := [name for name in named if name not in known]:
            raise topology.error("plan", f"it is for device {strays[0]}, which no host of the topology has")
        on_gpu = any(known[name].is_gpu for name in named)
        devices.append((*named, ANY_CPU) if on_gpu else tuple(named))
        classes.append("GPU" if on_gpu else known[named[0]].device_class if named else "")
    return replace(planned, devices=tuple(devices), classes=tuple(classes))


def _used(devices: Sequence[DeviceEntry], planned: PlannedSplit) -> list[DeviceEntry]:
    """Returns the GPUs among `devices` that the plan has stages for."""
    named = {name for ids in planned.devices for name in ids}
    return [device for device in devices if device.is_gpu and device.id in named]


def _field_of(topology: Topology, message: str) -> str:
    """Returns the field of the file that a message of the planner is about, as far as the message shows it."""
    named = ("boundaries", "targets", "memory_limit", "context", "parts", "profile", "objective")
    for field in named:
        option = f"--{field.replace('_', '-')}"
        words = (f"{field}: ", f"{option} ", f"{option}:", f"go by {field.replace('_', ' ')}:")
        value = getattr(topology, field)
        of_profile = field == "profile" and str(value) in message
        if value is not None and (any(word in message for word in words) or of_profile):
            return field
    if topology.targets is not None and "there is no device" in message:
        return "targets"
    return next((field for field in ("plan", "strategy") if getattr(topology, field) is not None), "hosts")


def _described(device: DeviceEntry, host: str) -> dict[str, Any]:
    """Returns a device in the form of the file of `plan --devices`. Raises UsageError for an impossible number."""
    described: dict[str, Any] = {"id": device.id, "class": device.device_class, "host": host, "speed": device.speed}
    if device.memory is not None:
        described["memory_bytes"] = int(_number(device.memory, "B", "memory"))
    for field, text, unit in (
        ("bytes_per_second", device.bytes_per_second, "B/s"),
        ("operations_per_second", device.operations_per_second, "/s"),
    ):
        if text is not None:
            described[field] = _number(text, unit, field)
    return described


def _number(text: float | str, unit: str, field: str) -> float:
    try:
        value = float(text)  # YAML reads 2e10 as a text
    except ValueError:
        value = parse_quantity(str(text), unit, where=field)
    if not 0 < value < inf:
        raise UsageError(f"{field}: {text} must be above 0")
    return value


def _check(topology: Topology, file: YamlFile) -> None:
    """Raises UsageError for entries that do not fit together.

    Device ids are unique, links are between hosts of the file, several hosts share a Redis.
    """
    seen: dict[str, str] = {}
    for host, entry in topology.hosts.items():
        for index, device in enumerate(entry.devices):
            where = ("hosts", host, "devices", index)
            if device.id in seen:
                raise file.error(where, f"device {device.id} is there twice, on {seen[device.id]} and {host}")
            seen[device.id] = host
            if "worker" in entry.roles and device.is_gpu:
                _check_gpu(device, lambda text, where=where: file.error(where, text))
            try:
                _described(device, host)
            except UsageError as error:
                raise file.error(where, str(error)) from None
    for index, link in enumerate(topology.links):
        if unknown := [host for host in link.between if host not in topology.hosts]:
            raise file.error(("links", index, "between"), f"there is no host {unknown[0]}")
    if len(topology.hosts) > 1 and topology.redis is None:
        raise file.error(("hosts",), "several hosts need a Redis that all of them reach: give its redis:// as redis")
    if topology.plan and topology.strategy:
        raise file.error(("plan",), "plan and strategy: give one of them")
    try:
        decode_fleet(json.dumps(topology.fleet).encode(), "devices and links")  # as `plan --devices` reads it
    except UsageError as error:
        raise file.error(("links" if "links[" in str(error) else "hosts",), str(error)) from None


def _check_gpu(device: DeviceEntry, error: Callable[[str], UsageError]) -> None:
    """Raises an error, made by `error`, if a GPU of a host with workers has a wrong class or no id."""
    if device.gpu is not None and device.device_class.upper().startswith("CPU"):
        raise error(f"device {device.id} is gpu {device.gpu}, and of class {device.device_class}")
    if not device.real_gpu:
        raise error(
            f"device {device.id} is of class {device.device_class}, and nothing says which device of the host it is: "
            f"add gpu: webgpu:0, for example ({typed('devices')} has them)"
        )


def _resolved(topology: Topology, folder: Path) -> Topology:
    """Returns the topology with paths relative to `folder` made absolute."""
    named = {name: getattr(topology, name) for name in ("model", "plan", "profile")}
    hosts = {
        name: entry.model_copy(update={"model": folder / entry.model}) if entry.model else entry
        for name, entry in topology.hosts.items()
    }
    return topology.model_copy(
        update={"hosts": hosts, **{name: folder / path for name, path in named.items() if path is not None}}
    )
