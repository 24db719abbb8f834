"""Measures how long streams stand still while blocks move: `python -m bench.scenarios.plan_moves --model DIR`.

It starts a system (`blockrelay up` with two stages), and has a plan applied with other stages, and then the first one
again, while `--streams` streams run, with other prompts each time. A pause is the longest time between two tokens of a
stream. Every answer is compared with that of an undisturbed system, whose pauses are measured too.
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

    split: str
    """The stages of the applied plan; empty: the plan did not change."""
    pause_s: float
    """The longest pause of any stream."""
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


def stream_round(system: RecoveringSystem, prompts: Sequence[Sequence[int]], tokens: int, plan: Path | None) -> Round:
    """Streams an answer of `tokens` tokens to each prompt, has `plan` applied meanwhile, and returns the outcome."""
    streams = [Stream(system.url, prompt, tokens, system.patience_s) for prompt in prompts]
    for stream in streams:
        stream.wait_for(max(1, int(tokens * BEFORE)))
    began, split = time.monotonic(), ""
    if plan is not None:
        argv = [sys.executable, "-P", "-m", "blockrelay_launcher", "plan", "apply", str(plan), "--json"]
        done = subprocess.run([*argv, "--data", str(system.data)], check=True, capture_output=True, text=True)
        split = json.loads(done.stdout)["split"]
    pauses = [stream.stall_s(began) for stream in streams]
    lost = sum(bool(stream.trouble) or len(stream.received) < tokens for stream in streams)
    moved = sum(len(runs_of(system, stream)) > 1 for stream in streams)
    return Round(split, max(pauses), lost, moved, [stream.received for stream in streams])


def runs_of(system: RecoveringSystem, stream: Stream) -> list[Any]:
    """Returns the runs that a stream's tokens came from."""
    path = f"{system.url}/v1/requests/{stream.request_id}/provenance"
    return httpx.get(path, timeout=10, trust_env=False).json()["runs"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the rounds, prints the figures, and returns the exit code: 1 if a stream failed or an answer differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="block folder")
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

    with running(chosen.model, 2, ["--stages", "2", *options], patience_s=chosen.patience) as system:
        files = [system.data / "other.json", system.data / "equal.json"]
        for file, stages in zip(files, (other_stages(equal), equal), strict=True):
            file.write_text(plan_text(stages))
        rounds: list[tuple[Round, Round]] = []
        for plan in islice(cycle(files), chosen.times):
            asked = prompts()
            moving, undisturbed = (stream_round(system, asked, chosen.tokens, each) for each in (plan, None))
            rounds.append((moving, undisturbed))
            if not chosen.json:
                print(
                    f"{moving.split:16} longest pause {moving.pause_s:.3f} s, undisturbed {undisturbed.pause_s:.3f} s",
                    flush=True,
                )
    pairs = [pair for one, right in rounds for pair in zip(one.answers, right.answers, strict=True)]
    differing = sum(moved != undisturbed for moved, undisturbed in pairs)
    figures = {
        "streams": chosen.streams,
        "changes": len(rounds),
        "moved": sum(one.moved for one, _ in rounds),
        "undisturbed_pause_s": round(max(right.pause_s for _, right in rounds), 3),
        "longest_pause_s": round(max(one.pause_s for one, _ in rounds), 3),
        "lost": sum(one.lost for one, _ in rounds),
        "differing": differing,
    }
    print(json.dumps(figures) if chosen.json else "  ".join(f"{name} {value}" for name, value in figures.items()))
    return 1 if figures["lost"] or differing else 0


if __name__ == "__main__":
    sys.exit(main())
