"""Seconds and bytes of a block on a device and of a hop between two devices, from a profile or from figures. Pure.

For a class of devices in the profile the measured times are divided by the device's speed. A device described by
figures follows the roofline: a step takes as long as reading weights and KV pages, or as its operations, whichever is
longer. A profile measured in another precision is converted: everything but the linear layers stays, and for these the
profile has the times of random weights in each precision. Where it has none, the time of a step of one token is scaled
by the bytes of the weights, and what further tokens add stays. Converted and described times are estimates.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from blockrelay.block_folder.analysis import ModelAnalysis
from blockrelay.block_folder.model import Precision
from blockrelay.block_folder.precisions import kv_item_bytes
from blockrelay.errors import UsageError
from blockrelay.planning.devices import Device, Fleet
from blockrelay.planning.profile import BlockProfile, Hop, Profile, StepOverhead
from blockrelay.quantities import counted, format_seconds

#: A hop of hidden states over the payload Redis without a profile: measured with `blockrelay profile` on 2 cores.
DEFAULT_HOP = Hop(seconds=1.1e-3, seconds_per_byte=2.2e-9)


@dataclass(frozen=True, slots=True)
class CostModel:
    """The costs of one model's blocks. Blocks are numbered from 1 to N; all times are seconds.

    Times may be asked for only of devices that `check` accepts.
    """

    analysis: ModelAnalysis
    precisions: tuple[Precision, ...]
    """The precision of each block that is planned for."""
    profile: Profile | None = None
    """Measured times; None: every device must bring figures of its own."""
    measured_in: tuple[Precision, ...] | None = None
    """The precision of each block in which the profile was measured; None: `precisions`."""
    corrections: Mapping[int, float] = field(default_factory=dict[int, float])
    """Factors on the seconds of blocks, by number, that a running system has measured; 1 for blocks without one."""
    _classes: tuple[str, ...] = field(init=False)
    # The cached results of `prefix_seconds`: no other model has them, also not a copy with other corrections.
    _seconds: dict[tuple[object, ...], list[float]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_classes", self.profile.classes if self.profile else ())
        object.__setattr__(self, "_seconds", {})

    def check_profile(self) -> None:
        """Raises UsageError for a profile of another model's blocks."""
        names = {block.name for block in self.analysis.blocks}
        if self.profile is not None and set(self.profile.blocks) != names:
            raise UsageError(f"the profile is of another model: {_unlike(self.profile.blocks, self.analysis)}")

    def check(self, fleet: Fleet) -> None:
        """Raises UsageError for a device of unknown speed, and for a profile of another model's blocks."""
        self.check_profile()
        for device in fleet.devices:
            if not device.is_described and not self.is_profiled(device):
                known = ", ".join(self.profile.classes) if self.profile else "none, there is no profile"
                raise UsageError(
                    f"device {device.id}: class {device.device_class} was not measured (measured: {known}); give it "
                    "bytes_per_second, or profile it"
                )

    def is_estimated(self, device: Device) -> bool:
        """Returns whether the times of this device are estimates, not measurements."""
        return not self.is_profiled(device) or (self.measured_in or self.precisions) != self.precisions

    def assumptions(self, devices: Sequence[Device], *, hops: bool) -> list[str]:
        """Returns a sentence for each assumption behind the times of these devices; `hops`: the plan has hops."""
        sentences: list[str] = []
        if hops and not (self.profile and "redis" in self.profile.hop):
            sentences.append(f"hops take {format_seconds(DEFAULT_HOP.seconds)} and their bytes, as they did on 2 cores")
        if not self.knows_steps:
            sentences.append("sampling and messages take no time")
        for name in dict.fromkeys(device.device_class for device in devices if self.is_profiled(device)):
            assert self.profile is not None
            if any(len(classes[name].seconds) == 1 for classes in self.profile.blocks.values()):
                sentences.append(f"{name}: a step of many rows takes as long as one of 1 row, the only ones measured")
        return sentences

    def seconds(self, device: Device, first: int, last: int, rows: float, context: float) -> float:
        """Seconds of a step of blocks [first, last] (inclusive) with `rows` tokens that attend to `context` each."""
        sums = self.prefix_seconds(device, rows, context)
        return sums[last] - sums[first - 1]

    def prefix_seconds(self, device: Device, rows: float, context: float) -> Sequence[float]:
        """Sums of the seconds of a step: blocks 1 to i at index i, 0 at index 0. The result is cached.

        `rows` and `context` are as for `seconds`.
        """
        key = (device.device_class, device.speed, device.bytes_per_second, device.operations_per_second, rows, context)
        if key not in self._seconds:
            self._seconds[key] = list(accumulate(self.each_block_seconds(device, rows, context), initial=0.0))
        return self._seconds[key]

    def each_block_seconds(self, device: Device, rows: float, context: float) -> list[float]:
        """Seconds of a step of each block: block i at index i-1. `rows` and `context` are as for `seconds`."""
        numbers = range(1, len(self.analysis.blocks) + 1)
        return [self._block_seconds(device, n, rows, context) * self.corrections.get(n, 1.0) for n in numbers]

    def weight_bytes(self, first: int, last: int, device: Device) -> int:
        """Bytes of blocks [first, last] on this device: measured ones of the profile, else computed from the model."""
        return sum(self._block_bytes(device, index) for index in range(first, last + 1))

    def kv_bytes_per_token(self, first: int, last: int) -> int:
        """Bytes of keys and values of one token in blocks [first, last]."""
        blocks = self.analysis.blocks[first - 1 : last]
        return sum(block.kv_values_per_token for block in blocks) * kv_item_bytes(self.precisions)

    def hop_bytes(self, last: int, context: float) -> float:
        """Bytes that a stage that ends with block `last` sends on for one token that attends to `context` tokens."""
        block = self.analysis.blocks[last - 1]
        return block.hop_bytes_per_row + context * block.hop_bytes_per_row_and_token

    def hop_seconds(self, fleet: Fleet, a: Device, b: Device, size: float) -> float:
        """Seconds that `size` bytes take from device `a` to `b`: over the payload Redis, and the link between hosts."""
        hop, link = self._redis_hop, fleet.link(a.host, b.host)
        per_byte = hop.seconds_per_byte + (link.seconds_per_byte if link else 0.0)
        each = hop.seconds + (link.seconds if link else 0.0)
        return each + size * per_byte

    @property
    def _redis_hop(self) -> Hop:
        return self.profile.hop.get("redis", DEFAULT_HOP) if self.profile else DEFAULT_HOP

    def step_seconds(self, rows: float) -> float:
        """Seconds that a step of `rows` tokens takes besides its blocks and hops; 0 where this was not measured."""
        step = self.profile.step if self.profile else None
        return step.seconds + rows * step.seconds_per_row if step else 0.0

    @property
    def knows_steps(self) -> bool:
        """True if the profile has the seconds that a step takes besides its blocks and hops."""
        return self.profile is not None and self.profile.step != StepOverhead()

    def is_profiled(self, device: Device) -> bool:
        """Returns whether the profile has the device's class, in whatever precision."""
        return device.device_class in self._classes

    def _block_bytes(self, device: Device, index: int) -> int:
        """Bytes of one block's weights on this device."""
        block, precision = self.analysis.blocks[index - 1], self.precisions[index - 1]
        if self.profile is not None and self.is_profiled(device) and self._measured_in(index) == precision:
            measured = self.profile.blocks[block.name][device.device_class].bytes
            if measured is not None:
                return measured
        on_cpu = block.cpu_bytes if device.device_class == "CPU" else None
        return block.bytes[precision] if on_cpu is None else on_cpu

    def _measured_in(self, index: int) -> Precision:
        return (self.measured_in or self.precisions)[index - 1]

    def _block_seconds(self, device: Device, index: int, rows: float, context: float) -> float:
        """Seconds of a step of one block, by the module's rules."""
        block, precision = self.analysis.blocks[index - 1], self.precisions[index - 1]
        if self.profile is None or not self.is_profiled(device):
            return self._roofline(device, index, rows, context)
        times: BlockProfile = self.profile.blocks[block.name][device.device_class]
        measured_in = self._measured_in(index)
        seconds = times.at(rows, context)
        if measured_in != precision:
            products = self.profile.products.get(device.device_class, {})
            if {precision, measured_in} <= products.keys():
                now, then = (products[p].at(rows, is_head=not block.layers) for p in (precision, measured_in))
                seconds = max(seconds + now - then, now)
            else:
                one_row = times.at(1, context)
                seconds += one_row * (block.step_bytes[precision] / block.step_bytes[measured_in] - 1)
        return seconds / device.speed

    def _roofline(self, device: Device, index: int, rows: float, context: float) -> float:
        """Seconds of a step of one block on a device described by figures."""
        block, precision = self.analysis.blocks[index - 1], self.precisions[index - 1]
        assert device.bytes_per_second is not None
        moved = block.step_bytes[precision] + rows * context * self.kv_bytes_per_token(index, index)
        operations = rows * (block.flops_per_row + context * block.attention_flops)
        computing = operations / device.operations_per_second if device.operations_per_second else 0.0
        return max(moved / device.bytes_per_second, computing) / device.speed


def _unlike(profiled: Collection[str], analysis: ModelAnalysis) -> str:
    """Says how the blocks of a profile differ from the model's: their counts, and the first that is not in both."""
    has = f"it has {counted(len(profiled), 'block')}, the model {analysis.model} has {len(analysis.blocks)}"
    lacking = [block.name for block in analysis.blocks if block.name not in profiled]
    if lacking:
        return f"{has}, and {lacking[0]} is not in the profile"
    names = {block.name for block in analysis.blocks}
    return f"{has}, which has no {next(name for name in profiled if name not in names)}"
