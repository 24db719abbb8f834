"""Measures how large bodies delay other requests of a gateway: `python -m bench.large_bodies [TREE]`.

The machine should be idle otherwise. A whole `up` of TREE (default: this checkout) with the bundled model gets
`--bodies` large bodies of five kinds at once: a text of one letter, empty objects in `metadata`, token ids, a tensor as
nested lists, and a chat of many parts. Meanwhile `/livez` and a small request are sent again and again.

Printed are the longest time that `/livez` and the small request took during the large bodies, the most memory of the
gateway's process alone and with its helper processes, and the answers to the large bodies.
"""

import argparse
import collections
import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from bench.busy import busy_share
from bench.pairs import MODEL, ROOT, running

MIB = 1 << 20
#: Most bytes of a body: a little below the gateway's default limit.
MAX_BODY_BYTES = 8 * MIB - 1024
LOOK_S = 0.01


def kinds() -> list[tuple[str, bytes]]:
    """Returns path and body of each of the five kinds."""
    tensor = {"_tensor_": True, "data": [[1] * 1000] * 2500}
    part = {"type": "text", "text": "And then she went on. "}
    return [
        ("/v1/completions", json.dumps({"prompt": "a" * (4 * MIB)}).encode()),
        ("/v1/completions", b'{"prompt": "x", "metadata": [' + b"{}," * (MAX_BODY_BYTES // 3 - 20) + b"{}]}"),
        ("/v1/completions", json.dumps({"prompt": [7] * (MAX_BODY_BYTES // 3 - 20)}).encode()),
        ("/v1/infer", json.dumps({"input_tensors": {"input_ids": tensor}}).encode()),
        (
            "/v1/chat/completions",
            json.dumps({"messages": [{"role": "user", "content": [part] * 60_000}] * 2}).encode(),
        ),
    ]


def gateway_of(up: int) -> int:
    """Returns the process id of the gateway of the `up` with this process id. Raises RuntimeError without one."""
    for process in _descendants(up):
        if b"blockrelay_gateway" in (Path("/proc") / str(process) / "cmdline").read_bytes():
            return process
    raise RuntimeError("there is no gateway")


def _descendants(root: int) -> list[int]:
    """Returns all living processes below `root`, parents before children."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended meanwhile
    processes = [root]
    for process in processes:
        processes += [child for child, parent in parents.items() if parent == process]
    return processes[1:]


def resident(process: int) -> int:
    """Returns the resident bytes of a process; 0 once it has ended."""
    try:
        return int((Path("/proc") / str(process) / "statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


class Meter:
    """Measures the longest seconds that a repeated call took."""

    def __init__(self) -> None:
        self.longest = 0.0

    def again(self, work: Callable[[], object], stop: threading.Event) -> None:
        """Calls `work` every LOOK_S seconds until `stop` is set."""
        while not stop.is_set():
            began = time.perf_counter()
            work()
            self.longest = max(self.longest, time.perf_counter() - began)
            stop.wait(LOOK_S)


class Memory:
    """Measures the most resident bytes of a gateway alone (`own`) and with its helper processes (`all`)."""

    def __init__(self, gateway: int) -> None:
        self._gateway, self.own, self.all = gateway, 0, 0

    def look(self) -> None:
        """Takes one measurement."""
        own = resident(self._gateway)
        self.own = max(self.own, own)
        self.all = max(self.all, own + sum(map(resident, _descendants(self._gateway))))


def measure(tree: Path, bodies: int) -> None:
    """Runs a system, sends the large bodies, and prints the figures."""
    with running(tree, MODEL, (), {}) as side, ThreadPoolExecutor(bodies + 3) as threads:
        small = {"prompt": "Once", "max_tokens": 1, "temperature": 0}
        memory, stop = Memory(gateway_of(side.pid)), threading.Event()
        alive, others, looks = Meter(), Meter(), Meter()
        with (
            httpx.Client(base_url=side.url, timeout=300, trust_env=False) as probe,
            httpx.Client(base_url=side.url, timeout=300, trust_env=False) as one,
        ):
            for _ in range(20):
                one.post("/v1/completions", json=small).raise_for_status()
            work = [
                threads.submit(alive.again, lambda: probe.get("/livez").raise_for_status(), stop),
                threads.submit(others.again, lambda: one.post("/v1/completions", json=small), stop),
                threads.submit(looks.again, memory.look, stop),
            ]
            time.sleep(0.5)
            print(
                f"before: /livez {alive.longest:.3f} s, a small request {others.longest:.3f} s, "
                f"gateway {memory.own / 1e6:.0f} MB",
                flush=True,
            )
            alive.longest, began, requests = 0.0, time.perf_counter(), kinds()

            def send(number: int) -> str:
                path, body = requests[number % len(requests)]
                answer = httpx.post(f"{side.url}{path}", content=body, timeout=300, trust_env=False)
                message = "" if answer.is_success else answer.json()["error"]["message"][:80]
                return f"{answer.status_code} {message}".strip()

            answers = collections.Counter(threads.map(send, range(bodies)))
            took = time.perf_counter() - began
            stop.set()
            for done in work:
                done.result()
    print(
        f"{bodies} large bodies in {took:.1f} s: /livez {alive.longest:.3f} s, a small request {others.longest:.3f} s, "
        f"gateway {memory.own / 1e6:.0f} MB, with its helpers {memory.all / 1e6:.0f} MB; answers {dict(answers)}",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> int:
    """Prints the figures and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, nargs="?", default=ROOT, help="a checkout with its environment in .venv")
    parser.add_argument("--bodies", type=int, default=10, help="large bodies at once")
    chosen = parser.parse_args(arguments)
    print(f"other programs take {busy_share():.0%} of this machine")
    measure(chosen.tree.resolve(), chosen.bodies)
    return 0


if __name__ == "__main__":
    sys.exit(main())
