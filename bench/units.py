"""The units that `make bench` measures, each of a few minutes: one side in one round of one part."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.environments import LLAMACPP, PEERS, Peer
from bench.quality.model_file import MODEL

OURS, OURS_SMALL = "Blockrelay w8a8", "Blockrelay w4a8"
#: The precision of each of our sides in the part `peers`.
OUR_PRECISIONS = {OURS: "w8a8", OURS_SMALL: "w4a8"}
ROUNDS = 3
NEW = 48
#: The model of `make quality`, a public one of 135 million parameters that people use.
REAL = MODEL
WORDS = ("32,000 words", "128,256 words")
#: (requests, prompt, new) of every side of the part `peers`.
CASES = ((1, 128, NEW), (4, 128, NEW), (16, 128, NEW), (1, 2048, 8))
#: Those on the real model.
REAL_CASES = CASES[:3]
SIZES = "--requests 1,4,16 --prompt 128 --new 48 --rounds 1 --no-in-process"
SAMPLED = "--requests 1,16 --prompt 128 --new 32 --rounds 1 --sampled --no-in-process"
ROOF = "--new 2 --rounds 1 --no-in-process --roofline"
LONG = "--requests 1 --prompt 2048 --new 8 --rounds 1 --no-in-process"
STAGES = "--requests 1,16 --prompt 128 --new 48 --rounds 1 --no-in-process"


@dataclass(frozen=True, slots=True)
class OurRuns:
    """Runs of `blockrelay bench` that measure one of our sides."""

    options: tuple[str, ...]
    """The options of each run."""
    shape: str = "llama1b"
    """The model, as of `Unit.shape`."""
    precision: str = "w8a8"


def _in_precisions(*options: str, shape: str = "llama1b") -> dict[str, OurRuns]:
    """Returns runs with these options for our sides of each precision."""
    return {side: OurRuns(options, shape, precision) for side, precision in OUR_PRECISIONS.items()}


#: The runs of each of our sides, by part. The sides of a part with several take turns.
OUR_RUNS: dict[str, dict[str, OurRuns]] = {
    "real": _in_precisions(SIZES, shape=REAL),
    "sampled": {OURS: OurRuns(("--requests 1,16 --prompt 128 --new 64 --rounds 3 --sampled",), REAL)},
    "vocabulary": {WORDS[0]: OurRuns((SAMPLED,)), WORDS[1]: OurRuns((SAMPLED,), "llama1b-128k")},
    "sizes": {
        OURS: OurRuns(
            (
                "--requests 1 --prompt 8192 --new 8 --rounds 1 --no-in-process",
                "--requests 64 --prompt 128 --new 32 --rounds 1 --no-in-process",
            ),
            "llama1b-16k",
        )
    },
    "gateway": {OURS: OurRuns(("--requests 1,16 --prompt 128 --new 64 --rounds 3",))},
    "stages": {
        "1 stage, 2 threads": OurRuns((f"{STAGES} --stages 1 --threads 2",)),
        "2 stages, 2 threads each": OurRuns((f"{STAGES} --stages 2 --threads 2",)),
        "2 stages, 1 thread each": OurRuns((f"{STAGES} --stages 2 --threads 1",)),
    },
    "position": {OURS: OurRuns(("--requests 1 --prompt 100,2000 --new 32 --rounds 3 --no-in-process",))},
    "prefix": {OURS: OurRuns(("--requests 1 --prompt 128 --new 2 --rounds 3 --prefix 1024 --no-in-process",))},
    "kv_cache": {
        OURS: OurRuns(("--requests 1 --prompt 64,512 --new 8 --rounds 5 --stages 2 --kv-cache --no-in-process",))
    },
    "memory": {OURS: OurRuns(("--requests 16 --prompt 128 --new 64 --rounds 1 --memory --no-in-process",))},
    "roofline": _in_precisions(f"--requests 1,4,16 --prompt 128 {ROOF}", f"--requests 1 --prompt 2048 {ROOF}"),
    "llama8b": {
        OURS: OurRuns(("--requests 1,4 --prompt 128 --new 32 --rounds 1 --memory --no-in-process",), "llama8b")
    },
}
#: Peers on the very file of the real model, in the part `real`: the peer and the name of its side.
ON_THE_FILE = (LLAMACPP, "llama.cpp, the file as it is")
#: The module of bench.scenarios that measures a part.
SCENARIOS = {"distributor": "distributor", "llama2_7b": "distributor"}
#: Not measured unless asked for by name: checkpoints of 13 and 16 GB have to be made and converted.
ON_DEMAND = ("llama8b", "llama2_7b")
PARTS = ("peers", *OUR_RUNS, *SCENARIOS)


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
    shape: str = "llama1b"
    """The model: a key of `bench.checkpoint.SHAPES`, or REAL."""

    @property
    def key(self) -> tuple[str, str, int]:
        """Part, side and round, which name the unit."""
        return self.part, self.side, self.round


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
                for side, ours in sides.items():
                    yield Unit(
                        part=part,
                        side=side,
                        round=number,
                        runs=ours.options,
                        precision=ours.precision,
                        shape=ours.shape,
                    )
                if part == "real":
                    peer, side = ON_THE_FILE
                    yield Unit(part=part, side=side, round=number, peer=peer, precision="file", shape=REAL)
    for part, scenario in SCENARIOS.items():
        if part in parts:
            shape = "llama2-7b" if part == "llama2_7b" else "llama1b"
            yield Unit(part=part, side=OURS, round=0, scenario=scenario, shape=shape)
