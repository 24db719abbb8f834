"""Measures how long a client waits when its gateway dies: `python -m bench.scenarios.gateway_kills --model DIR`.

It starts a system with two gateways, and sends one stream at a time through the resuming client. In the middle of each
the gateway that serves it is killed (kill -9), and the client goes on at the other. The wait is from the kill to the
first event after it. Every stream must have each position once, in order, and the same tokens as an undisturbed one.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.scenarios.recovery import RecoveringSystem, running, wait_until
from blockrelay.up_file import read_running
from blockrelay_launcher.client.resuming import resuming_stream
from blockrelay_launcher.drill.system import environment_of
from blockrelay_launcher.percentile import percentile

TOKENS = 200
#: Tokens that the client has when its gateway dies.
BEFORE = 40


def gateways(system: RecoveringSystem) -> dict[str, int]:
    """Returns the process id of every gateway that is ready, by its URL."""
    ports: dict[str, int] = {}
    for pid, command in system.children().items():
        if "blockrelay_gateway" in command:
            ports[environment_of(pid).get("BLOCKRELAY_PORT", "")] = pid
    urls = read_running(system.data).urls
    return {url: ports[port] for url in urls if (port := url.rpartition(":")[2]) in ports and answers(url)}


def answers(url: str) -> bool:
    """Returns whether the gateway at this address is ready."""
    try:
        return httpx.get(f"{url}/readyz", timeout=2, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def serving(urls: dict[str, int]) -> int:
    """Returns the process id of the gateway that has the stream."""

    def has_it(url: str) -> bool:
        lines = httpx.get(f"{url}/metrics", timeout=2, trust_env=False).text.splitlines()
        return any(
            line.startswith("blockrelay_gateway_requests_running") and float(line.split()[-1]) > 0 for line in lines
        )

    return next(pid for url, pid in urls.items() if has_it(url))


def kill_in_mid_stream(system: RecoveringSystem, body: dict[str, Any]) -> tuple[float, list[int]]:
    """Runs a stream and kills its gateway; returns the seconds until the first event after the kill, and all tokens.

    Raises RuntimeError for an event that is missing or comes twice.
    """
    wait_until(lambda: len(gateways(system)) == 2, "two gateways")
    urls = gateways(system)
    cuts: list[str] = []
    tokens: list[int] = []
    killed, waited = 0.0, 0.0
    for at, event in enumerate(resuming_stream(list(urls), "/v1/completions", body, retrying=cuts.append), start=1):
        if event.id.rpartition(":")[2] != str(at):
            raise RuntimeError(f"event {event.id} where {at} is due")
        tokens += event.data["choices"][0]["token_ids"]
        if cuts and killed and not waited:
            waited = time.monotonic() - killed
        if at == BEFORE:
            os.kill(serving(urls), signal.SIGKILL)
            killed = time.monotonic()
    return waited, tokens


def main(arguments: list[str] | None = None) -> int:
    """Kills gateways, prints the figures, and returns the exit code. Raises RuntimeError for a wrong answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="block folder")
    parser.add_argument("--times", type=int, default=30, help="number of kills")
    parser.add_argument("--json", action="store_true")
    chosen, options = parser.parse_known_args(arguments)
    prompt = [10 + at * 7 % 200 for at in range(64)]
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with running(chosen.model, 1, ["--gateways", "2", *options]) as system:
        (url, *_) = read_running(system.data).urls
        golden = httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False).json()["choices"][0][
            "token_ids"
        ]
        waits: list[float] = []
        for _ in range(chosen.times):
            waited, tokens = kill_in_mid_stream(system, body)
            if tokens != golden or not waited:
                raise RuntimeError("the stream was not cut" if not waited else "other tokens than in the first run")
            waits.append(waited)
    figures = {"times": len(waits), "p50_s": round(median(waits), 3), "p99_s": round(percentile(waits, 0.99), 3)}
    print(json.dumps(figures) if chosen.json else "  ".join(f"{name} {value:g}" for name, value in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
