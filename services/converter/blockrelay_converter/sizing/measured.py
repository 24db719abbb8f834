"""What was measured, with the machine and the command of each figure. Data: `capacity` computes with it.

Seconds of CPU, bytes and counts are of the bundled model's systems; but for the pace of a core they do not depend on
the model. A machine whose cores are twice as fast halves the seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

#: Where a figure comes from: name -> machine and command.
SOURCES: Mapping[str, str] = {
    "shape": "computed from the model's shape; equal to the files of a converted folder",
    "streams": "measured on 2 cores, seconds of CPU of real systems under load: docs/one-million-streams.md, "
    "make bench-simulator",
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
    """How much of one thing each request, new token, token of a prompt and call of COMMIT takes; and what an idle
    system takes in a second."""

    source: str
    request: float = 0.0
    token: float = 0.0
    prompt_token: float = 0.0
    commit: float = 0.0
    second: float = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure."""

    value: float
    source: str


#: Commands of the control Redis as `INFO` counts them: those that scripts call count, too.
REDIS_COMMANDS = Cost(source="capacity", request=89.0, token=2.75, commit=8.2, second=148.0)
#: Bytes of its append-only file (with a byte more for a token of a prompt than was measured: an id of a vocabulary of
#: more than 65,536 takes three), and those that reach the device: every sync writes whole pages of 4 KiB.
FILE_BYTES = Cost(source="capacity", request=5740.0, token=290.0, prompt_token=8.7, commit=161.0, second=752.0)
DEVICE_BYTES = Cost(source="capacity", request=11_800.0, token=290.0, prompt_token=24.0, commit=4680.0, second=13_200.0)
#: Syncs, where none is shared: pages that were written say how many there can have been.
SYNCS = Cost(source="capacity", request=2.9, commit=1.15, second=3.3)
#: Seconds of its one thread, without waits for the disk.
REDIS_CPU = Cost(source="streams", request=0.000594, token=0.0000193, commit=0.000116)
#: Bytes on its wires, to and from all.
REDIS_WIRE = Cost(source="capacity", request=3470.0, token=205.0, prompt_token=13.4, commit=721.0, second=25_800.0)
#: Bytes of its process without requests.
REDIS_ALONE_BYTES = Measured(17e6, "capacity")
#: Bytes of it (the same of ids) for a request under way, and for one that has ended and is kept.
UNDER_WAY_BYTES = Cost(source="capacity", request=7060.0, token=6.0, prompt_token=4.0)
#: A log is kept as it is for so long after its request's end, for slow readers (docs/redis-keys.md). Seconds.
LINGERS_S = 15.0
ENDED_BYTES = Cost(source="capacity", request=830.0, token=5.3, prompt_token=4.0)
#: Seconds of CPU of gateways. They read for all their streams at once, at most so often in a second each.
GATEWAY_CPU = Cost(source="streams", request=0.001694, token=0.0000492)
GATEWAY_READ_S, GATEWAY_READS_A_SECOND = Measured(0.000255, "streams"), 50.0
#: Bytes: of a gateway's memory alone, of its helpers that read large bodies, for an open stream; and on the wire to its
#: client for a token.
GATEWAY_ALONE_BYTES = Measured(100e6, "capacity")
GATEWAY_HELPERS_BYTES = Measured(275e6, "bodies")
GATEWAY_STREAM_BYTES = Measured(56_000.0, "capacity")
CLIENT_TOKEN_BYTES = Measured(308.0, "streams")
#: A scheduler's memory, and its cores.
SCHEDULER_BYTES = Measured(77e6, "capacity")
SCHEDULER_CPU = Measured(0.012, "capacity")
#: Bytes of a CPU worker's process beside its weights and KV pages.
WORKER_ALONE_BYTES = Measured(300e6, "capacity")
#: Operations a second that a core gets done in w8a8, 16 requests at once, prompts and new tokens alike; and what share
#: of that the others get done: w4a8 measured beside it, floats as vectors of 32 bits are a quarter as wide.
CORE_OPERATIONS = Measured(0.30e12, "benchmarks")
PRECISION_PACE: Mapping[str, float] = {"w8a8": 1.0, "w4a8": 0.9, "fp32": 0.25, "fp16": 0.25}
#: How far off such a scaling may be, to both sides.
PACE_FACTOR = 2.0
