"""The measured costs that `capacity` computes with, and the machine and command of each figure.

Seconds of CPU, bytes and counts were measured with the bundled model. Except for the pace of a core they do not depend
on the model. A machine whose cores are twice as fast halves the seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

#: Sources of the figures: the machine and command by the name of the source.
SOURCES: Mapping[str, str] = {
    "shape": "computed from the model's shape; equal to the files of a converted folder",
    "streams": "measured on 2 cores, seconds of CPU of real systems under load: docs/cells.md, make bench-simulator",
    "capacity": "measured on 2 cores, Intel Xeon at 2.50 GHz (Cascade Lake, AVX-512 VNNI), bundled model: "
    "python -m bench.scenarios.capacity",
    "bodies": "measured on 2 cores, Intel Xeon at 2.5 GHz (AMX): docs/performance.md, python -m bench.large_bodies",
    "benchmarks": "measured on 2 cores, AMD EPYC (AVX-512 VNNI), 1.1 billion parameters: docs/benchmarks.md, "
    'make bench ARGS="--only peers"',
    "model": "computed from the others by a rule that docs/sizing.md tells; not measured",
    "given": "as given on the command line",
    "profiled": "from the profile that was given",
    "not profiled": "not profiled: a range, scaled from another model by operations",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one resource per request, new token, prompt token, COMMIT and second of an idle system."""

    source: str
    """A key of SOURCES."""
    request: float = 0.0
    token: float = 0.0
    prompt_token: float = 0.0
    commit: float = 0.0
    second: float = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure and its source, a key of SOURCES."""

    value: float
    source: str


#: Commands of the control Redis as `INFO` counts them, which includes those that scripts call.
REDIS_COMMANDS = Cost(source="capacity", request=89.0, token=2.75, commit=8.2, second=148.0)
#: Bytes of its append-only file, and bytes that reach the device: every sync writes whole pages of 4 KiB. A prompt
#: token has one byte more than was measured, because an id of a vocabulary above 65,536 takes three.
FILE_BYTES = Cost(source="capacity", request=5740.0, token=290.0, prompt_token=8.7, commit=161.0, second=752.0)
DEVICE_BYTES = Cost(source="capacity", request=11_800.0, token=290.0, prompt_token=24.0, commit=4680.0, second=13_200.0)
#: Syncs of the append-only file if writes share none, an upper bound computed from the pages that were written.
SYNCS = Cost(source="capacity", request=2.9, commit=1.15, second=3.3)
#: Seconds of CPU of the control Redis' one thread, without waits for the disk.
REDIS_CPU = Cost(source="streams", request=0.000594, token=0.0000193, commit=0.000116)
#: Bytes of the control Redis on the network, in both directions.
REDIS_WIRE = Cost(source="capacity", request=3470.0, token=205.0, prompt_token=13.4, commit=721.0, second=25_800.0)
#: Memory in bytes of the control Redis without requests.
REDIS_ALONE_BYTES = Measured(17e6, "capacity")
#: Memory in bytes of a running request (ids counted as in FILE_BYTES).
UNDER_WAY_BYTES = Cost(source="capacity", request=7060.0, token=6.0, prompt_token=4.0)
#: Seconds that a request's log stays whole after its end, for slow readers (docs/redis-keys.md).
LINGERS_S = 15.0
#: Memory in bytes of a request that has ended and is kept.
ENDED_BYTES = Cost(source="capacity", request=830.0, token=5.3, prompt_token=4.0)
#: Seconds of CPU of gateways, and of one read of a cell. A gateway reads for all its streams at once, at most
#: GATEWAY_READS_A_SECOND times per second.
GATEWAY_CPU = Cost(source="streams", request=0.001694, token=0.0000492)
GATEWAY_READ_S, GATEWAY_READS_A_SECOND = Measured(0.000255, "streams"), 50.0
#: Memory in bytes of a gateway alone, of its helpers that read large bodies, and of an open stream; then bytes on the
#: network to a client for a token.
GATEWAY_ALONE_BYTES = Measured(100e6, "capacity")
GATEWAY_HELPERS_BYTES = Measured(275e6, "bodies")
GATEWAY_STREAM_BYTES = Measured(56_000.0, "capacity")
CLIENT_TOKEN_BYTES = Measured(308.0, "streams")
#: Memory of a scheduler in bytes.
SCHEDULER_BYTES = Measured(77e6, "capacity")
#: Bytes of a CPU worker's process beside its weights and KV pages.
WORKER_ALONE_BYTES = Measured(300e6, "capacity")
#: Operations per second of a core in w8a8 with 16 requests at once, prompts and new tokens alike; then the share of it
#: that each precision reaches. w4a8 was measured beside it; floats of 32 bits have vectors a quarter as wide.
CORE_OPERATIONS = Measured(0.35e12, "benchmarks")
PRECISION_PACE: Mapping[str, float] = {"w8a8": 1.0, "w4a8": 0.75, "fp32": 0.25, "fp16": 0.25}
#: Factor by which a pace that is scaled from CORE_OPERATIONS may be too high or too low.
PACE_FACTOR = 2.0
