"""Measures all costs and sizes on real systems on this host."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.simulate.configurations import Configuration, known
from bench.simulate.costs import Costs
from bench.simulate.measured.alone import ReadCosts, beside, read_stream_cost, speeds, sync_cost, turn_s
from bench.simulate.measured.blocks import block_costs, neighbour_ratios
from bench.simulate.measured.calibrating import calibrated
from bench.simulate.measured.counting import Counted, footprint, measured
from bench.simulate.measured.driving import System, running
from bench.simulate.measured.fitting import Alone, fitted
from bench.simulate.measured.hops import hop_costs
from bench.simulate.sizing import Footprint
from blockrelay.block_folder.folder import open_block_folder
from blockrelay.host.cpu import cores

IDLE_S = 2.0


def taken(model: Path, seconds: float) -> tuple[Costs, list[Counted]]:
    """Measures all costs of a model on this host; returns them, and the counts of the known configurations.

    Each configuration is measured for `seconds`.
    """
    folder = open_block_folder(model)
    shape, blocks = folder.model, block_costs(folder)
    reads, syncs = read_stream_cost(), beside(cores(), sync_cost)
    ones, stages = known()
    with running(model) as system:
        idle = _idle(system)
        of_ones = _counted(system, ones, seconds, shape.vocab_size)
    with running(model, stages=2) as system:
        of_stages = _counted(system, stages, seconds, shape.vocab_size)
    alone = Alone(
        blocks=blocks,
        hop=hop_costs(shape.hidden_size),
        sync=syncs[0][0],
        fsync=tuple(wait for _, wait in syncs),
        turn=turn_s(cores()),
        speeds=speeds(cores()),
        neighbour=neighbour_ratios(model) if cores() > 1 else {},
        read_stream=reads.redis,
        gateway_read_stream=reads.gateway,
        idle=idle,
    )
    costs = calibrated(
        fitted(of_ones, of_stages, alone),
        [(one, counted.figures) for one, counted in zip(ones, of_ones, strict=True)],
        [(one, counted.figures) for one, counted in zip(stages, of_stages, strict=True)],
    )
    return costs, [*of_ones, *of_stages]


def _counted(system: System, several: Sequence[Configuration], seconds: float, vocabulary: int) -> list[Counted]:
    return [measured(system, one.load, seconds, vocabulary, scripts=True) for one in several]


def _idle(system: System) -> Mapping[str, float]:
    """Returns the seconds of CPU per second of each kind of process, without requests."""
    before = system.cpu_s()
    time.sleep(IDLE_S)
    return {kind: (spent - before[kind]) / IDLE_S for kind, spent in system.cpu_s().items()}


def sizes(model: Path, known: Sequence[Counted], reads: ReadCosts) -> Footprint:
    """Measures the memory and the bytes that streams take.

    The bytes of a token come from the one of the `known` measurements with most tokens.
    """
    counted = max(known, key=lambda one: one.tokens)
    with running(model) as system:
        in_flight, ended, stream = footprint(system, open_block_folder(model, blocks=[]).model.vocab_size)
    read_bytes = counted.reads * counted.load.clients * reads.wire_bytes
    return Footprint(
        redis_request=in_flight,
        redis_ended=ended,
        redis_token=(counted.redis_bytes - read_bytes) / counted.tokens,
        redis_read_stream=reads.wire_bytes,
        gateway_stream=stream,
        client_token=counted.client_bytes / counted.tokens,
    )
