"""Measures how fast a preempted request goes on: `python -m bench.scenarios.preemption --model DIR`.

A system (`blockrelay up` with one worker) has KV pages for little more than one long request. A request with a prompt
of `--context` tokens runs beside an older one, whose answer grows until it has taken all pages. When the older one has
ended, the preempted one goes on. The time from there to its next token is compared with its prefill: the time to its
first token. The same happens where pages come back from shared memory, from a swap folder, and from nowhere.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from bench.scenarios.recovery import RecoveringSystem, Stream, running
from blockrelay.block_folder.folder import open_block_folder
from blockrelay.protocol.plan import Stage
from blockrelay_worker.kernels.specification import PAGE
from blockrelay_worker.lifecycle.parts import page_bytes_of

PLACES = ("memory", "disk", "none")
#: Tokens of the preempted request's answer, and pages of the pool beyond those of its prompt.
ANSWER, MORE_PAGES = 100, 8


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """Sets environment variables for as long as the context lasts."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def preempted(system: RecoveringSystem, context: int, rng: random.Random, vocabulary: int) -> tuple[float, float]:
    """Has one request preempted; returns the seconds of its prefill, and those in which it went on.

    Raises RuntimeError for a request that failed, or that was not preempted.
    """
    older, younger = ([rng.randrange(10, vocabulary) for _ in range(count)] for count in (PAGE, context))
    first = Stream(system.url, older, context + (MORE_PAGES - 4) * PAGE, system.patience_s)
    first.wait_for(1)
    second = Stream(system.url, younger, ANSWER, system.patience_s)
    second.wait_for(1)
    first.wait_for(first.tokens)
    second.wait_for(second.tokens)
    before = [at for at in second.came if at < first.came[-1]]
    if len(before) == second.tokens:
        raise RuntimeError("the younger request was not preempted")
    return prefill_s(system, context, rng, vocabulary), second.came[len(before)] - first.came[-1]


def prefill_s(system: RecoveringSystem, context: int, rng: random.Random, vocabulary: int) -> float:
    """Returns the time to the first token of a request that is alone."""
    began = time.monotonic()
    alone = Stream(system.url, [rng.randrange(10, vocabulary) for _ in range(context)], 1, system.patience_s)
    alone.wait_for(1)
    return alone.came[0] - began


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures each place, prints the figures, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="block folder")
    parser.add_argument("--places", default=",".join(PLACES), help="where pages wait: memory, disk or none, by commas")
    parser.add_argument("--context", type=int, default=2000, help="tokens of the prompt")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--patience", type=float, default=600, help="most seconds of a token, or of loading")
    parser.add_argument("--json", action="store_true")
    chosen, options = parser.parse_known_args(arguments)
    folder = open_block_folder(chosen.model, blocks=[])
    page = page_bytes_of(folder, Stage(first=1, last=folder.model.blocks))
    kv_bytes = (-(-chosen.context // PAGE) + MORE_PAGES) * page
    figures: dict[str, dict[str, float]] = {}
    for place in chosen.places.split(","):
        rng = random.Random(1)
        with tempfile.TemporaryDirectory(prefix="br-swap-") as swap:
            more = {"BLOCKRELAY_SWAP_FOLDER": swap} if place == "disk" else {}
            store = [] if place == "memory" else ["--page-store-bytes", "0"]
            with (
                variables(BLOCKRELAY_KV_BYTES=str(kv_bytes), **more),
                running(chosen.model, 1, [*store, *options], patience_s=chosen.patience) as system,
            ):
                times = [preempted(system, chosen.context, rng, folder.model.vocab_size) for _ in range(chosen.times)]
        prefill, resume = (median(each) for each in zip(*times, strict=True))
        figures[place] = {
            "prefill_s": round(prefill, 3),
            "resume_s": round(resume, 3),
            "ratio": round(median(again / first for first, again in times), 3),
        }
        if not chosen.json:
            print(place, "  ".join(f"{name} {value}" for name, value in figures[place].items()), flush=True)
    if chosen.json:
        print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
