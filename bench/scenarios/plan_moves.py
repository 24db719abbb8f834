"""Measures how long streams stand still while blocks move: `python -m bench.scenarios.plan_moves --model DIR`.

It starts a system (`blockrelay up` with two stages), and has a plan applied with other stages, and then the first one
again, while `--streams` streams run, with other prompts each time. With `--other-precision DIR` it changes to the other
precision and back instead. A pause is the longest time between two tokens of a stream. Every answer is compared with
that of an undisturbed system, whose pauses are measured too. So is the time to the first token of a request that comes
right after the change.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx

from bench.scenarios.recovery import RecoveringSystem, Stream, running
from blockrelay.block_folder.folder import open_block_folder
from blockrelay.protocol.plan import uniform_split

#: Share of a stream's tokens that came before the plan changes.
BEFORE = 0.2


@dataclass(frozen=True, slots=True)
class Round:
    """The outcome of one round of streams."""

    pause_s: float
    """The longest pause of any stream."""
    first_token_s: float
    """Time to the first token of one more request, which came when the change was in force."""
    lost: int
    """Streams that failed."""
    moved: int
    """Streams with tokens of workers of both plans."""
    answers: list[list[int]]
    """The tokens of each stream."""


def plan_text(stages: Sequence[tuple[int, int]]) -> str:
    """Returns a plan file with these first and last blocks of its stages."""
    return json.dumps({"stages": [{"blocks": f"{first}-{last}"} for first, last in stages]})


def other_stages(stages: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns two stages with one block more in the first; both must have several blocks."""
    (first, border), (_, last) = stages
    return [(first, border + 1), (border + 2, last)]


def stream_round(
    system: RecoveringSystem, prompts: Sequence[Sequence[int]], tokens: int, change: Sequence[str]
) -> Round:
    """Streams an answer of `tokens` tokens to each prompt, runs the command `change` meanwhile, if there is one.

    Returns the outcome.
    """
    streams = [Stream(system.url, prompt, tokens, system.patience_s) for prompt in prompts]
    for stream in streams:
        stream.wait_for(max(1, int(tokens * BEFORE)))
    began = time.monotonic()
    if change:
        argv = [sys.executable, "-P", "-m", "blockrelay_launcher", *change, "--json", "--data", str(system.data)]
        subprocess.run(argv, check=True, capture_output=True)
    asked = time.monotonic()
    late = Stream(system.url, prompts[0][::-1], 1, system.patience_s)
    late.wait_for(1)
    first_token_s = late.came[0] - asked
    pauses = [stream.stall_s(began) for stream in streams]
    lost = sum(bool(stream.trouble) or len(stream.received) < tokens for stream in streams)
    moved = sum(len(runs_of(system, stream)) > 1 for stream in streams)
    return Round(max(pauses), first_token_s, lost, moved, [stream.received for stream in streams])


def runs_of(system: RecoveringSystem, stream: Stream) -> list[Any]:
    """Returns the runs that a stream's tokens came from."""
    path = f"{system.url}/v1/requests/{stream.request_id}/provenance"
    return httpx.get(path, timeout=10, trust_env=False).json()["runs"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the rounds, prints the figures, and returns the exit code: 1 if a stream failed or an answer differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="block folder")
    parser.add_argument("--other-precision", type=Path, help="block folder of the same checkpoint to change to")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--context", type=int, default=200, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of each answer")
    parser.add_argument("--times", type=int, default=6, help="changes of the plan")
    parser.add_argument("--patience", type=float, default=120, help="most seconds of a token, or of loading")
    parser.add_argument("--json", action="store_true")
    chosen, options = parser.parse_known_args(arguments)
    model = open_block_folder(chosen.model, blocks=[]).model
    equal = [(stage.first, stage.last) for stage in uniform_split(model.blocks, 2)]
    rng = random.Random(1)

    def prompts() -> list[list[int]]:
        return [[rng.randrange(10, model.vocab_size) for _ in range(chosen.context)] for _ in range(chosen.streams)]

    folders = [chosen.other_precision, chosen.model] if chosen.other_precision else []
    options += ["--other-precision", str(chosen.other_precision)] if folders else []
    with running(chosen.model, 2, ["--stages", "2", *options], patience_s=chosen.patience) as system:
        changes = [["precision", "set", open_block_folder(folder, blocks=[]).model_key] for folder in folders]
        for name, stages in (("other.json", other_stages(equal)), ("equal.json", equal)) if not folders else ():
            (system.data / name).write_text(plan_text(stages))
            changes.append(["plan", "apply", str(system.data / name)])
        rounds: list[tuple[Round, Round]] = []
        for change in islice(cycle(changes), chosen.times):
            asked = prompts()
            undisturbed, moving = (stream_round(system, asked, chosen.tokens, each) for each in ([], change))
            rounds.append((moving, undisturbed))
            if not chosen.json:
                pauses = f"{moving.pause_s:.3f} s, undisturbed {undisturbed.pause_s:.3f} s"
                firsts = f"{moving.first_token_s:.3f} s, undisturbed {undisturbed.first_token_s:.3f} s"
                print(f"{' '.join(change)}: longest pause {pauses}; first token of a new request {firsts}", flush=True)
    pairs = [pair for one, right in rounds for pair in zip(one.answers, right.answers, strict=True)]
    differing = sum(moved != undisturbed for moved, undisturbed in pairs)
    figures = {
        "streams": chosen.streams,
        "changes": len(rounds),
        "moved": sum(one.moved for one, _ in rounds),
        "undisturbed_pause_s": round(max(right.pause_s for _, right in rounds), 3),
        "longest_pause_s": round(max(one.pause_s for one, _ in rounds), 3),
        "undisturbed_first_token_s": round(max(right.first_token_s for _, right in rounds), 3),
        "first_token_s": round(max(one.first_token_s for one, _ in rounds), 3),
        "lost": sum(one.lost for one, _ in rounds),
        "differing": differing,
    }
    print(json.dumps(figures) if chosen.json else "  ".join(f"{name} {value}" for name, value in figures.items()))
    return 1 if figures["lost"] or differing else 0


if __name__ == "__main__":
    sys.exit(main())
