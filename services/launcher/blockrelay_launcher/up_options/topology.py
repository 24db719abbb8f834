"""`blockrelay up --topology FILE`: which hosts there are, what each has and does, and how the model is cut for them.

Every host reads the same file and starts its own part. All of them cut the model by the same rule from the same
figures, so that they agree without talking; the schedulers' plan is the one in force.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.bounded_file import read_bounded
from blockrelay.errors import UsageError
from blockrelay.planning.devices import decode_fleet
from blockrelay.protocol.planned_split import PlannedSplit
from blockrelay.quantities import parse_quantity
from blockrelay_launcher.up_options.options import LocalDevice, UpOptions
from blockrelay_launcher.up_options.plan_choice import PlanChoice

_MAX_BYTES = 1 << 20

#: A number, or one with its unit.
Quantity = Annotated[float, Field(gt=0)] | str
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class DeviceEntry(_Strict):
    """A device of a host. `memory`, `bytes_per_second` and `operations_per_second` with their units: 24GB, 900GB/s,
    80T/s."""

    id: Name
    device_class: Name = Field(alias="class", default="CPU")
    memory: Quantity | None = None
    speed: float = Field(default=1.0, gt=0)
    threads: int | None = Field(default=None, ge=1)
    bytes_per_second: Quantity | None = None
    operations_per_second: Quantity | None = None


class HostEntry(_Strict):
    """A host: what runs on it. `listen` is the address of its gateway."""

    roles: tuple[Literal["worker", "gateway", "scheduler"], ...] = ("worker",)
    devices: tuple[DeviceEntry, ...] = ()
    listen: str | None = None
    port: int | None = Field(default=None, ge=0, le=65535)
    model: Path | None = None


class LinkEntry(_Strict):
    """What rows take between two hosts."""

    between: tuple[Name, Name]
    seconds: float = Field(ge=0)
    seconds_per_byte: float = Field(ge=0)


class Topology(_Strict):
    """The file. Paths are relative to it; `model` of a host goes before that of all."""

    model: Path | None = None
    redis: str | None = None
    payload_redis: str | None = None
    plan: Path | None = None
    strategy: str | None = None
    objective: Literal["latency", "throughput"] | None = None
    profile: Path | None = None
    context: int | None = Field(default=None, ge=1)
    requests: int | None = Field(default=None, ge=1)
    boundaries: str | None = None
    targets: str | None = None
    hosts: dict[Name, HostEntry]
    links: tuple[LinkEntry, ...] = ()

    @property
    def fleet(self) -> dict[str, Any]:
        """The devices of all hosts, as the file of `plan --devices` has them."""
        return {
            "devices": [_described(device, host) for host, entry in self.hosts.items() for device in entry.devices],
            "links": [link.model_dump() for link in self.links],
        }


def read_topology(path: Path) -> Topology:
    """UsageError, one line, names the file, the line and the field."""
    content = read_bounded(path, _MAX_BYTES)
    try:
        root = yaml.compose(content, Loader=yaml.SafeLoader)
        _check_nodes(root, path)
        data: Any = yaml.safe_load(content)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        said = getattr(error, "problem", None) or "not YAML"
        raise UsageError(f"{path}{where}: {said}") from None
    except (UnicodeError, RecursionError):
        raise UsageError(f"{path}: not YAML") from None
    if root is None or not isinstance(data, dict):
        raise UsageError(f"{path}: a topology is a mapping with hosts")
    try:
        found = Topology.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = tuple(part for part in first["loc"] if part != "[key]")
        field = ".".join(map(str, where)) or "the file"
        raise UsageError(f"{path}, line {_line(root, where)}: {field}: {first['msg']}") from None
    _check(found, root, path)
    return _resolved(found, path.absolute().parent)


def options_for(topology: Topology, host: str | None, options: UpOptions) -> UpOptions:
    """What `up` runs on `host` (None: the only one), with the other options as they are. UsageError where that cannot
    be."""
    if host is None and len(topology.hosts) > 1:
        raise UsageError(f"--topology has several hosts: --host {' or '.join(topology.hosts)}")
    name = host or next(iter(topology.hosts))
    if name not in topology.hosts:
        raise UsageError(f"the topology has no host {name}: there is {', '.join(topology.hosts)}")
    entry = topology.hosts[name]
    model = entry.model or topology.model or options.model
    planned = _plan(topology, model)
    local = {device.id: _local(device) for device in entry.devices} if "worker" in entry.roles else {}
    return replace(
        options,
        model=model,
        planned=planned,
        local=local,
        gateways=int("gateway" in entry.roles),
        schedulers=int("scheduler" in entry.roles),
        host=entry.listen or "127.0.0.1",
        port=options.port if entry.port is None else entry.port,
        redis_url=topology.redis,
        payload_redis_url=topology.payload_redis,
    )


def _plan(topology: Topology, model: Path) -> PlannedSplit:
    blocks = open_block_folder(model, blocks=[]).model.blocks
    with tempfile.NamedTemporaryFile("w", suffix=".json") as devices:
        json.dump(topology.fleet, devices)
        devices.flush()
        choice = PlanChoice(
            plan=topology.plan,
            strategy=topology.strategy or (None if topology.plan else "auto"),
            objective=topology.objective,
            profile=topology.profile,
            devices=None if topology.plan else Path(devices.name),
            context=None if topology.context is None else str(topology.context),
            requests=topology.requests,
            boundaries=topology.boundaries,
            targets=topology.targets,
        )
        planned = choice.read(model, blocks)
    known = {device.id for entry in topology.hosts.values() for device in entry.devices}
    if strays := [name for devices in planned.devices for name in devices if name not in known]:
        raise UsageError(f"the plan is for device {strays[0]}, which no host of the topology has")
    return planned


def _local(device: DeviceEntry) -> LocalDevice:
    kind = "gpu" if device.device_class.upper().startswith("GPU") else "cpu"
    return LocalDevice(device=kind, threads=device.threads)


def _described(device: DeviceEntry, host: str) -> dict[str, Any]:
    described: dict[str, Any] = {"id": device.id, "class": device.device_class, "host": host, "speed": device.speed}
    quantities = (("memory_bytes", device.memory, "B"), ("bytes_per_second", device.bytes_per_second, "B/s"),
                  ("operations_per_second", device.operations_per_second, "/s"))  # fmt: skip
    for field, text, unit in quantities:
        if text is not None:
            value = _number(text, unit, field)
            described[field] = int(value) if unit == "B" else value
    return described


def _number(text: float | str, unit: str, field: str) -> float:
    try:
        return float(text)  # 2e10 is a text in YAML
    except ValueError:
        return parse_quantity(str(text), unit, where=field)


def _check(topology: Topology, root: yaml.Node, path: Path) -> None:
    """What only the whole tells: devices are there once, links are between hosts, several hosts share a Redis."""
    seen: dict[str, str] = {}
    for host, entry in topology.hosts.items():
        for index, device in enumerate(entry.devices):
            line = _line(root, ("hosts", host, "devices", index))
            if device.id in seen:
                both = f"{seen[device.id]} and {host}"
                raise UsageError(f"{path}, line {line}: device {device.id} is there twice, on {both}")
            seen[device.id] = host
            try:
                _described(device, host)
            except UsageError as error:
                raise UsageError(f"{path}, line {line}: hosts.{host}.devices.{index}: {error}") from None
    for index, link in enumerate(topology.links):
        if unknown := [host for host in link.between if host not in topology.hosts]:
            line = _line(root, ("links", index, "between"))
            raise UsageError(f"{path}, line {line}: links.{index}.between: there is no host {unknown[0]}")
    if len(topology.hosts) > 1 and topology.redis is None:
        raise UsageError(f"{path}: redis: several hosts need a Redis that all of them reach")
    if topology.plan and topology.strategy:
        raise UsageError(f"{path}, line {_line(root, ('plan',))}: plan and strategy: give one of them")
    decode_fleet(json.dumps(topology.fleet).encode(), str(path))  # as `plan --devices` reads it


def _resolved(topology: Topology, folder: Path) -> Topology:
    """With absolute paths."""
    named = {name: getattr(topology, name) for name in ("model", "plan", "profile")}
    hosts = {
        name: entry.model_copy(update={"model": folder / entry.model}) if entry.model else entry
        for name, entry in topology.hosts.items()
    }
    return topology.model_copy(
        update={"hosts": hosts, **{name: folder / path for name, path in named.items() if path is not None}}
    )


def _check_nodes(root: yaml.Node | None, path: Path) -> None:
    """No key twice (the last would count), no alias (a page of them is a terabyte)."""
    seen: set[int] = set()
    for node in _nodes(root):
        if id(node) in seen:
            raise UsageError(f"{path}, line {node.start_mark.line + 1}: aliases (*) are not taken here")
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise UsageError(f"{path}, line {key.start_mark.line + 1}: a name is one word")
                if key.value in keys:
                    raise UsageError(f"{path}, line {key.start_mark.line + 1}: {key.value} is there twice")
                keys.add(str(key.value))


def _nodes(root: yaml.Node | None) -> Iterator[yaml.Node]:
    waiting = [root] if root is not None else []
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, yaml.MappingNode):
            waiting += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


def _line(root: yaml.Node, where: Sequence[str | int]) -> int:
    """Of the innermost part of `where` that is there."""
    node, line = root, root.start_mark.line
    for part in where:
        found: yaml.Node | None = None
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == str(part):
                    line, found = key.start_mark.line, value
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            found = node.value[part]
            line = found.start_mark.line
        if found is None:
            break
        node = found
    return line + 1
