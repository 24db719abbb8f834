"""Measures how a plan follows a stage that becomes slow: `python -m bench.scenarios.slow_stage --model DIR`.

It starts a system of three stages and keeps it busy with `--streams` streams. Then a control group limits the CPU time
of the middle worker, and the scheduler moves borders (after BLOCKRELAY_REPLAN_AFTER_S, two minutes). It prints tokens a
second before the limit, with it, and with the better plan, the seconds from the limit until that plan serves, and the
longest pause between two tokens of any stream from the limit on. Every answer is compared with that of an undisturbed
system.
"""

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path

from bench.scenarios.recovery import RecoveringSystem, Stream, running
from blockrelay.block_folder.folder import open_block_folder
from blockrelay.redis.client import connect
from blockrelay.redis.registry import read_plan, read_workers
from blockrelay.up_file import read_running

#: Tokens of each prompt and of each answer.
PROMPT, TOKENS = 64, 200
#: Seconds between two looks at the plan: each reads Redis, which is busy enough.
LOOK_S = 0.5
#: Different prompts.
SEEDS = 16
#: Seconds of each of the three measurements of speed.
MEASURED_S = 15.0
#: Microseconds of the period in which a control group limits CPU time.
PERIOD_US = 100_000


@contextmanager
def limited_cpu(pid: int, share: float) -> Generator[None]:
    """Limits a process to this share of one core while the `with` block runs, by a control group of its own.

    Raises OSError where this process may make none.
    """
    root = Path("/sys/fs/cgroup")
    unified = (root / "cgroup.controllers").exists()
    parent = root if unified else root / "cpu"
    group = parent / f"blockrelay-{pid}"
    quota = int(share * PERIOD_US)
    group.mkdir()
    try:
        if unified:
            (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for left in (group / "cgroup.procs").read_text().split():
            (parent / "cgroup.procs").write_text(left)
        group.rmdir()


@dataclass
class Crowd:
    """Streams that follow one another, some at once, until `end`."""

    url: str
    vocabulary: int
    streams: int
    patience_s: float
    seen: list[tuple[int, Stream]] = field(default_factory=list[tuple[int, Stream]])
    """The streams, each with the seed of its prompt, of which there are SEEDS."""
    _numbers: "count[int]" = field(default_factory=count)
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list[threading.Thread])

    def begin(self) -> None:
        """Starts the streams."""
        self._threads = [threading.Thread(target=self._ask_on, daemon=True) for _ in range(self.streams)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Waits until the streams that run have ended."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def tokens_per_second(self, seconds: float = MEASURED_S) -> float:
        """Returns the speed of the next `seconds` seconds."""
        before, began = self._tokens(), time.monotonic()
        time.sleep(seconds)
        return (self._tokens() - before) / (time.monotonic() - began)

    def longest_pause(self, since: float) -> float:
        """Returns the longest time between two tokens of a stream that ended after `since` (monotonic seconds)."""
        pauses = [after - before for _, one in self.seen for before, after in pairwise(one.came) if after > since]
        return max(pauses, default=0.0)

    def ask(self, seed: int) -> Stream:
        """Starts the stream of a seed."""
        rng = random.Random(seed)
        return Stream(self.url, [rng.randrange(10, self.vocabulary) for _ in range(PROMPT)], TOKENS, self.patience_s)

    def _tokens(self) -> int:
        return sum(len(one.received) for _, one in list(self.seen))

    def _ask_on(self) -> None:
        while not self._over.is_set():
            seed = next(self._numbers) % SEEDS
            stream = self.ask(seed)
            self.seen.append((seed, stream))
            stream.wait_for(TOKENS)


def split_served(system: RecoveringSystem) -> str:
    """Returns the stages of the plan in force if workers serve them and no others, else ""."""
    with connect(read_running(system.data).redis_url) as client:
        plan = read_plan(client, system.keys, system.model)
        workers = read_workers(client, system.keys, system.model)
    return plan.split if plan and all(w.ready and w.split == plan.split for w in workers) else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the measurement, prints the figures, and returns the exit code: 1 if an answer differed or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="block folder")
    parser.add_argument("--streams", type=int, default=4, help="streams at once")
    parser.add_argument("--share", type=float, default=0.22, help="share of a core that the slow worker gets")
    parser.add_argument("--patience", type=float, default=300, help="most seconds of an answer, and of the better plan")
    parser.add_argument("--json", action="store_true")
    chosen, options = parser.parse_known_args(arguments)
    vocabulary = open_block_folder(chosen.model, blocks=[]).model.vocab_size
    with running(chosen.model, 3, ["--stages", "3", *options], patience_s=chosen.patience) as system:
        crowd = Crowd(system.url, vocabulary, chosen.streams, chosen.patience)
        crowd.begin()
        crowd.tokens_per_second(5.0)  # the first seconds read weights
        first, before = split_served(system), crowd.tokens_per_second()
        with connect(read_running(system.data).redis_url) as client:
            slow = next(w.pid for w in read_workers(client, system.keys, system.model) if w.stage == 1)
        with limited_cpu(slow, chosen.share):
            began = time.monotonic()
            limited = crowd.tokens_per_second()
            while (second := split_served(system)) in ("", first):
                if time.monotonic() - began > chosen.patience:
                    raise TimeoutError(f"no better plan within {chosen.patience:g} s")
                time.sleep(LOOK_S)
            served_s = time.monotonic() - began
            after = crowd.tokens_per_second()
            crowd.end()
            pause = crowd.longest_pause(began)
        alone = [crowd.ask(seed) for seed in range(SEEDS)]
        for stream in alone:
            stream.wait_for(TOKENS)
    figures = {
        "before": first,
        "after": second,
        "tokens_per_second": [round(one, 1) for one in (before, limited, after)],
        "served_after_s": round(served_s, 1),
        "longest_pause_s": round(pause, 3),
        "answers": len(crowd.seen),
        "lost": sum(bool(one.trouble) for _, one in crowd.seen),
        "differing": sum(one.received != alone[seed].received for seed, one in crowd.seen),
    }
    print(json.dumps(figures) if chosen.json else "  ".join(f"{name} {value}" for name, value in figures.items()))
    return 1 if figures["lost"] or figures["differing"] else 0


if __name__ == "__main__":
    sys.exit(main())
