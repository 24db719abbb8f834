"""The units that `make bench` measures, each of a few minutes: one side in one round of one part."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.environments import PEERS, Peer

OURS, OURS_SMALL = "Blockrelay w8a8", "Blockrelay w4a8"
#: The precision of each of our sides in the part `peers`.
OUR_PRECISIONS = {OURS: "w8a8", OURS_SMALL: "w4a8"}
ROUNDS = 3
NEW = 48
#: (requests, prompt, new) of every side of the part `peers`.
CASES = ((1, 128, NEW), (4, 128, NEW), (16, 128, NEW), (1, 2048, 8))
SIZES = "--requests 1,4,16 --prompt 128 --new 48 --rounds 1 --no-in-process"
ROOF = "--new 2 --rounds 1 --no-in-process --roofline"
LONG = "--requests 1 --prompt 2048 --new 8 --rounds 1 --no-in-process"
STAGES = "--requests 1,16 --prompt 128 --new 48 --rounds 1 --no-in-process"

#: Options of the runs of `blockrelay bench`, by part and side. The sides of a part with several take turns.
OUR_RUNS: dict[str, dict[str, tuple[str, ...]]] = {
    "gateway": {OURS: ("--requests 1,16 --prompt 128 --new 64 --rounds 3",)},
    "stages": {
        "1 stage, 2 threads": (f"{STAGES} --stages 1 --threads 2",),
        "2 stages, 2 threads each": (f"{STAGES} --stages 2 --threads 2",),
        "2 stages, 1 thread each": (f"{STAGES} --stages 2 --threads 1",),
    },
    "position": {OURS: ("--requests 1 --prompt 100,2000 --new 32 --rounds 3 --no-in-process",)},
    "prefix": {OURS: ("--requests 1 --prompt 128 --new 2 --rounds 3 --prefix 1024 --no-in-process",)},
    "kv_cache": {OURS: ("--requests 1 --prompt 64,512 --new 8 --rounds 5 --stages 2 --kv-cache --no-in-process",)},
    "memory": {OURS: ("--requests 16 --prompt 128 --new 64 --rounds 1 --memory --no-in-process",)},
    "roofline": dict.fromkeys(
        OUR_PRECISIONS, (f"--requests 1,4,16 --prompt 128 {ROOF}", f"--requests 1 --prompt 2048 {ROOF}")
    ),
    "llama8b": {OURS: ("--requests 1,4 --prompt 128 --new 32 --rounds 1 --memory --no-in-process",)},
}
#: The module of bench.scenarios that measures a part.
SCENARIOS = {"distributor": "distributor", "llama2_7b": "distributor"}
#: Not measured unless asked for by name: checkpoints of 13 and 16 GB have to be made and converted.
ON_DEMAND = ("llama8b", "llama2_7b")
PARTS = ("peers", *OUR_RUNS, *SCENARIOS)
#: Shapes of the models that are not of 1.1 billion parameters.
_SHAPES = {"llama8b": "llama8b", "llama2_7b": "llama2-7b"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One side in one round of a part: it has either `runs`, a `scenario` or a `peer`."""

    part: str
    side: str
    round: int
    runs: tuple[str, ...] = ()
    """Options of runs of `blockrelay bench`."""
    peer: Peer | None = None
    scenario: str = ""
    """A module of bench.scenarios."""
    precision: str = "w8a8"

    @property
    def key(self) -> tuple[str, str, int]:
        """Part, side and round, which name the unit."""
        return self.part, self.side, self.round

    @property
    def shape(self) -> str:
        """The shape of its model, a key of `bench.checkpoint.SHAPES`."""
        return _SHAPES.get(self.part, "llama1b")


def side_of(peer: Peer, precision: str) -> str:
    """Returns the name of a peer's side."""
    return f"{peer.title} {precision}"


def all_units(parts: Sequence[str], *, rounds: int = ROUNDS) -> Iterator[Unit]:
    """Yields all units of these parts in their order: the sides of a part take turns, for `rounds` rounds.

    A part with one side has one round. Rounds after the first measure only the contenders among the peers.
    """
    if "peers" in parts:
        for number in range(rounds):
            for side, precision in OUR_PRECISIONS.items():
                yield Unit(part="peers", side=side, round=number, runs=(SIZES, LONG), precision=precision)
            for peer in PEERS:
                for precision in (p for p in peer.precisions if number == 0 or p == peer.contender):
                    yield Unit(
                        part="peers", side=side_of(peer, precision), round=number, peer=peer, precision=precision
                    )
    for part, sides in OUR_RUNS.items():
        if part in parts:
            for number in range(rounds if len(sides) > 1 else 1):
                for side, runs in sides.items():
                    precision = OUR_PRECISIONS.get(side, "w8a8")
                    yield Unit(part=part, side=side, round=number, runs=runs, precision=precision)
    for part, scenario in SCENARIOS.items():
        if part in parts:
            yield Unit(part=part, side=OURS, round=0, scenario=scenario)
