"""Compares the speed of this tree with another: `python -m bench.pairs OTHER [--model DIR]`.

The machine should be idle otherwise. OTHER is a checkout of another commit with its environment in `.venv` (`make
install`). A pair is a newly started `up` of each tree: two `up`s of one tree differ by several per cent for as long as
they live, and only many starts average that. For each size the sides take four turns, this, other, other, this, so that
a machine that slows down slows both; the next pair begins with the other. A turn is `--requests` completions at once,
`--rounds` times.

Printed are, for each size, tokens per second, CPU seconds per thousand tokens (of all processes of the `up`, Redis too)
and the ratios this / other: their mean with its 95 % confidence interval (normal), and their median. Both sides must
give the same tokens, unless the other one has a folder of its own (`--other-model`), as a release with other numbers
needs. The exit code is 1 if the lower end of a speed ratio is below 0.97.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, stdev

import httpx

from blockrelay.errors import BlockrelayError
from blockrelay.up_file import read_running
from blockrelay_launcher.bench.figures import Drawing

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "shared/blockrelay/models/storyteller"
FLOOR = 0.97
TICK = os.sysconf("SC_CLK_TCK")


#: The size of a turn: requests at once, tokens of each prompt, new tokens of each request.
Size = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class How:
    """How `blockrelay up` runs on both sides."""

    models: tuple[Path, Path]
    """Block folders of this tree and of the other."""
    options: tuple[str, ...]
    """Other options of `up`."""
    variables: Mapping[str, str]
    """Environment variables of this tree's side only."""
    drawing: Drawing
    """How the tokens of all requests are drawn."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One measurement of a side."""

    seconds: float
    """Seconds until all answers were there."""
    cpu_s: float
    """CPU seconds of the whole system."""
    answers: list[list[int]]
    """The token ids of each answer."""

    @property
    def tokens(self) -> int:
        """The number of tokens of all answers."""
        return sum(map(len, self.answers))


def whole(turns: Sequence[Turn]) -> Turn:
    """Returns the sum of turns."""
    return Turn(
        sum(turn.seconds for turn in turns),
        sum(turn.cpu_s for turn in turns),
        [answer for turn in turns for answer in turn.answers],
    )


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median and mean of paired ratios, and half the width of the mean's 95 % confidence interval."""

    median: float
    mean: float
    half: float

    @property
    def lower(self) -> float:
        """The lower end of the confidence interval."""
        return self.mean - self.half


def ratio_of(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """Returns the ratio of `over / under`, pair by pair, for at least two pairs."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return Ratio(median(ratios), mean(ratios), 1.96 * stdev(ratios) / len(ratios) ** 0.5)


@dataclass(frozen=True, slots=True)
class Side:
    """A running `blockrelay up`: its process id and the address of its gateway."""

    pid: int
    url: str

    def turn(self, requests: int, prompt: int, new: int, *, drawing: Drawing, rounds: int = 1) -> Turn:
        """Sends `requests` completions at once, `rounds` times, and measures them.

        Each has a prompt of `prompt` tokens and generates `new` tokens. Raises httpx.HTTPError when an answer is an
        error.
        """
        bodies = [
            {
                "prompt": [3 + (at * 7 + number * 13) % 190 for at in range(prompt)],
                "max_tokens": new, "seed": number, "ignore_eos": True, "return_token_ids": True, **asdict(drawing),
            }
            for number in range(requests)
        ]  # fmt: skip
        cpu, started = self.cpu_s(), time.perf_counter()
        with ThreadPoolExecutor(requests) as threads:
            answers = [tokens for _ in range(rounds) for tokens in list(threads.map(self._tokens, bodies))]
        return Turn(time.perf_counter() - started, self.cpu_s() - cpu, answers)

    def _tokens(self, body: dict[str, object]) -> list[int]:
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=600, trust_env=False)
        return answer.raise_for_status().json()["choices"][0]["token_ids"]

    def cpu_s(self) -> float:
        """Returns the user and system seconds so far of the process and all its living descendants."""
        parents: dict[int, int] = {}
        ticks: dict[int, int] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended meanwhile
            pid = int(stat.parent.name)
            parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])

        def belongs(pid: int) -> bool:
            while pid > 1 and pid != self.pid:
                pid = parents.get(pid, 0)
            return pid == self.pid

        return sum(used for pid, used in ticks.items() if belongs(pid)) / TICK


@contextmanager
def running(tree: Path, model: Path, options: Sequence[str], variables: Mapping[str, str]) -> Iterator[Side]:
    """Runs `blockrelay up` of `tree` with a block folder and a data folder of its own, and yields when it is ready.

    Raises RuntimeError when it does not get ready within 300 s.
    """
    with tempfile.TemporaryDirectory(prefix="br-pairs-") as folder:
        data, log = Path(folder) / "data", Path(folder) / "log"
        command = [tree / ".venv/bin/blockrelay", "up", "--model", model, "--port", "0", "--data", data]
        with log.open("wb") as output:
            environment = {**os.environ, **variables}
            process = subprocess.Popen([*command, *options], stdout=output, stderr=output, cwd=tree, env=environment)
        try:
            deadline = time.monotonic() + 300
            while not (url := _ready(data)):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{tree} does not get ready: {log.read_text()[-500:]}")
                time.sleep(0.1)
            yield Side(process.pid, url)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def _ready(data: Path) -> str:
    """Returns the address of the gateway if it is ready, else an empty text."""
    try:
        (url, *_) = read_running(data).urls
        return url if httpx.get(f"{url}/readyz", trust_env=False).status_code == 200 else ""
    except (BlockrelayError, httpx.TransportError):
        return ""


def measure(trees: Sequence[Path], sizes: Sequence[Size], first: int, rounds: int, how: How) -> list[tuple[Turn, Turn]]:
    """Measures one pair of sides, and returns what both took for each size.

    The tree with the index `first` (0 or 1) starts first and has the first turn. Raises RuntimeError when the sides
    have one model and give different tokens.
    """
    with ExitStack() as stack:
        sides: dict[int, Side] = {}
        for at in (first, 1 - first):
            sides[at] = stack.enter_context(
                running(trees[at], how.models[at], how.options, {} if at else how.variables)
            )
        measured: list[tuple[Turn, Turn]] = []
        for size in sizes:
            turns: tuple[list[Turn], list[Turn]] = ([], [])
            for side in sides.values():
                side.turn(*size, drawing=how.drawing)  # not measured: fills caches
            for at in (first, 1 - first, 1 - first, first):
                turns[at].append(sides[at].turn(*size, drawing=how.drawing, rounds=rounds))
            this, other = (whole(one) for one in turns)
            if how.models[0] == how.models[1] and this.answers != other.answers:
                raise RuntimeError(f"the sides give different tokens for {size[0]} requests")
            measured.append((this, other))
    return measured


def report(size: Size, pairs: Sequence[tuple[Turn, Turn]]) -> Ratio:
    """Prints the figures of one size, and returns the ratio of speeds."""
    rates = [[one[at].tokens / one[at].seconds for one in pairs] for at in (0, 1)]
    costs = [[1000 * one[at].cpu_s / one[at].tokens for one in pairs] for at in (0, 1)]
    speed, cost = ratio_of(*rates), ratio_of(*costs)
    print(
        f"{size[0]} requests, prompt {size[1]}, {size[2]} new: {median(rates[0]):.1f} / {median(rates[1]):.1f} tok/s, "
        f"ratio {speed.mean:.3f} ± {speed.half:.3f}, median {speed.median:.3f}; CPU per 1000 tokens "
        f"{median(costs[0]):.3f} / {median(costs[1]):.3f} s, "
        f"ratio {cost.mean:.3f} ± {cost.half:.3f}, median {cost.median:.3f}",
        flush=True,
    )
    return speed


def _end(number: int, _frame: object) -> None:
    """Ends the process by an exception, so that both `up`s end too."""
    sys.exit(128 + number)


def main(arguments: list[str] | None = None) -> int:
    """Measures all pairs, prints the figures, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="another checkout with its environment, or . for this one")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment variable of this tree's side only; may be given several times",
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="block folder")
    parser.add_argument("--other-model", type=Path, metavar="MODEL", help="block folder of the other side")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--requests", default="1,16", help="numbers of requests at once")
    parser.add_argument(
        "--rounds", type=int, default=3, help="repetitions in a turn, which should take a second or more"
    )
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=200, help="new tokens of each request")
    parser.add_argument("--stages", default="1")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument(
        "--no-prefix-cache", action="store_true", help="both sides compute every prompt again in each turn"
    )
    chosen = parser.parse_args(arguments)
    if chosen.pairs < 2 or not (chosen.other / ".venv/bin/blockrelay").exists():
        parser.error("--pairs must be 2 or more" if chosen.pairs < 2 else f"{chosen.other} has no .venv/bin/blockrelay")
    sizes = [(int(n), chosen.prompt, chosen.new) for n in chosen.requests.split(",")]
    models = (chosen.model.resolve(), (chosen.other_model or chosen.model).resolve())
    options = ("--stages", chosen.stages, *(["--no-prefix-cache"] if chosen.no_prefix_cache else []))
    drawing = Drawing(chosen.temperature, chosen.top_p)
    how = How(models, options, dict(one.split("=", 1) for one in chosen.env), drawing)
    signal.signal(signal.SIGTERM, _end)
    trees = (ROOT, chosen.other.resolve())
    pairs = [measure(trees, sizes, number % 2, chosen.rounds, how) for number in range(chosen.pairs)]
    speeds = [report(size, [pair[at] for pair in pairs]) for at, size in enumerate(sizes)]
    return 0 if min(speed.lower for speed in speeds) >= FLOOR else 1


if __name__ == "__main__":
    sys.exit(main())
