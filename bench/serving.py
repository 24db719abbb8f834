"""Times the whole service over HTTP: `python bench/serving.py [--model DIR] [--stages N] [--concurrency 1 4 16]`.

Starts `blockrelay up`, streams greedy completions, and prints what clients see. A round is repeated and its fastest
total shown: on a shared machine the slower ones measure the neighbours.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from blockrelay.block_folder import open_block_folder
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_launcher.demo import running_up


@dataclass(frozen=True, slots=True)
class Stream:
    """When the request was sent and each token came, in seconds of one clock."""

    sent: float
    tokens: list[float]

    @property
    def first_ms(self) -> float:
        return 1000 * (self.tokens[0] - self.sent)

    @property
    def gaps_ms(self) -> list[float]:
        return [1000 * (b - a) for a, b in zip(self.tokens, self.tokens[1:], strict=False)]


async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> Stream:
    sent, tokens = time.perf_counter(), list[float]()
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0].get("token_ids"):
                tokens.append(time.perf_counter())
    return Stream(sent, tokens)


async def round_of(url: str, model: str, concurrency: int, prompt: int, tokens: int) -> tuple[float, list[Stream]]:
    """`concurrency` requests at once, each with another prompt: seconds for all of them, and each."""
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        started = time.perf_counter()
        bodies = [
            {
                "model": model, "prompt": [5 + (i + j * 7) % 200 for j in range(prompt)], "max_tokens": tokens,
                "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True,
            }
            for i in range(concurrency)
        ]  # fmt: skip
        streams = await asyncio.gather(*(stream(client, body) for body in bodies))
        return time.perf_counter() - started, list(streams)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 50])
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per request")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    name = open_block_folder(options.model, blocks=[]).model.name
    table = Table("stages", "requests", "tokens/s", "first token, ms", "p95", "between tokens, ms", "p95", title=name)
    for stages in options.stages:
        with running_up(options.model.absolute(), stages) as url:
            asyncio.run(round_of(url, name, 2, options.prompt, 8))  # warm
            for concurrency in options.concurrency:
                rounds = [
                    asyncio.run(round_of(url, name, concurrency, options.prompt, options.tokens))
                    for _ in range(options.rounds)
                ]
                seconds, streams = min(rounds, key=lambda r: r[0])
                first = [s.first_ms for s in streams]
                gaps = [gap for s in streams for gap in s.gaps_ms]
                figures = (concurrency * options.tokens / seconds, *spread(first), *spread(gaps))
                table.add_row(str(stages), str(concurrency), *(f"{figure:.1f}" for figure in figures))
    Console().print(table)
    return 0


def spread(values: list[float]) -> tuple[float, float]:
    """Median and 95th percentile."""
    ordered = sorted(values)
    return statistics.median(ordered), ordered[int(0.95 * (len(ordered) - 1))]


if __name__ == "__main__":
    sys.exit(main())
