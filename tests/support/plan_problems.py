"""Problems for strategies: models of some blocks, devices, and profiles by hand."""

from collections.abc import Mapping, Sequence

from blockrelay.block_folder.analysis import BlockCost, ModelAnalysis
from blockrelay.planning.devices import Device, DeviceLink, Fleet
from blockrelay.planning.profile import BlockProfile, Hop, Profile
from blockrelay_scheduler.planning.cost_model import CostModel
from blockrelay_scheduler.planning.problem import Objective, Problem, Promise, Wishes

KB = 1000


def analysis(
    blocks: int, *, sizes: Sequence[int] | None = None, kv: int = 0, hops: Sequence[tuple[int, int]] | None = None
) -> ModelAnalysis:
    """Blocks of `sizes` bytes in w8a8 (default: 1 kB each), `kv` KV bytes per token in each but the last. `hops`: what
    each hands on for a row, and for each token that the row attends to (default: 100 bytes, and none)."""
    sizes, hops = sizes or [KB] * blocks, hops or [(100, 0)] * blocks
    return ModelAnalysis(
        model="made-up",
        context=1024,
        blocks=tuple(
            _block(index, size, kv if index < blocks else 0, hop)
            for index, (size, hop) in enumerate(zip(sizes, hops, strict=True), 1)
        ),
    )


def _block(index: int, size: int, kv: int, hop: tuple[int, int]) -> BlockCost:
    return BlockCost(
        index=index,
        layers=1,
        parameters=size,
        bytes={"w8a8": size, "w4a8": size // 2, "fp32": 4 * size},
        step_bytes={"w8a8": size, "w4a8": size // 2, "fp32": 4 * size},
        flops_per_row=2 * size,
        attention_flops=0,
        kv_values_per_token=kv // 2,
        hop_bytes_per_row=hop[0],
        hop_bytes_per_row_and_token=hop[1],
    )


def device(
    name: str, device_class: str = "CPU", *, memory: int | None = None, speed: float = 1.0, host: str | None = None
) -> Device:
    """On a host of its own unless one is named."""
    return Device(id=name, device_class=device_class, host=host or f"host-of-{name}", memory_bytes=memory, speed=speed)


def problem(
    devices: Sequence[Device],
    seconds: Mapping[str, Sequence[Mapping[int, float]]],
    *,
    objective: Objective = "throughput",
    sizes: Sequence[int] | None = None,
    kv: int = 0,
    requests: int = 4,
    context: int = 100,
    hop: Hop | None = None,
    hops: Sequence[tuple[int, int]] | None = None,
    links: Sequence[DeviceLink] = (),
    wishes: Wishes | None = None,
) -> Problem:
    """`seconds` class -> of each block, by rows; `hops` as of `analysis`."""
    count = len(next(iter(seconds.values())))
    profile = Profile(
        blocks={
            f"block_{index}": {name: BlockProfile(seconds=each[index - 1]) for name, each in seconds.items()}
            for index in range(1, count + 1)
        },
        hop={"redis": hop or Hop(seconds=0.0, seconds_per_byte=0.0)},
    )
    model = analysis(count, sizes=sizes, kv=kv, hops=hops)
    return Problem(
        analysis=model,
        fleet=Fleet(devices=tuple(devices), links=tuple(links)),
        costs=CostModel(model, ("w8a8",) * count, profile),
        objective=objective,
        promise=Promise(context=context, requests=requests),
        wishes=wishes or Wishes(),
    )


def costs(blocks: int) -> CostModel:
    """The costs of a model of equal blocks, without a profile."""
    return CostModel(analysis(blocks), ("w8a8",) * blocks)
