"""Measures the Llama distributor's published figures here: `python -m bench.scenarios.distributor --model DIR`.

The model is in two parts, each a worker of its own. Printed, or with `--json` as one object, are

    load_s       seconds to read the whole model, lay it out for the kernels, and check every block's known answer
    split_s      seconds to compute the cost of each block and which part gets it
    weights_s    seconds to read and lay out both parts, one after the other
    init_s       seconds to check the known answers of all blocks of both parts
    hop_s        seconds of one token from a worker to the next: encoded, through shared memory, decoded
    same         whether 20 tokens and the log probabilities of the five best of each have the same bits in two parts
    copy_s       seconds to bring a token to the next part within one process (`blockrelay generate --explain`)
    requests     requests that were sent through the gateway; one that fails ends the measurement
    gateway, kv_cache, memory and others as `blockrelay bench` reports them: times with the KV cache and without,
                 memory of each part

`make bench ARGS="--only distributor"` writes the table of docs/benchmarks.md from it. A model of Llama-2-7B's own shape
is measured on demand: `make bench ARGS="--only llama2_7b"`. Files are in the page cache, so that no disk is measured.
Figures are never asserted.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.hop import one_way_s
from bench.published import plain
from blockrelay.block_folder.analysis import analyse
from blockrelay.block_folder.folder import open_block_folder
from blockrelay.host.cpu import cores
from blockrelay.protocol.plan import uniform_split
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_worker.execution.cpu.loading import CpuExecutors
from blockrelay_worker.execution.cpu.stage import StageExecutor
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.execution.self_test import first_mismatch, fixed_tokens
from blockrelay_worker.kernels import load_kernels

PARTS, NEW, ROUNDS, PROMPT = 2, 20, 3, 64
#: Tokens of a long answer, the same as in the distributor's measurement.
LONG_NEW = 50
BENCH = f"--requests 1 --prompt {PROMPT} --new {LONG_NEW} --rounds {ROUNDS} --stages {PARTS}"
BENCH_RUN = f"{BENCH} --kv-cache --memory --no-in-process"
#: The number of requests: in each round, and in the one before them, one of `bench` and five of `--kv-cache`; and one
#: while memory is measured.
REQUESTS = (ROUNDS + 1) * 6 + 1


def loading(model: Path) -> dict[str, float]:
    """Measures the seconds of loading, splitting and preparing both parts in this process."""
    began = time.perf_counter()
    folder = open_block_folder(model)
    pages, threads = pages_for(PROMPT + LONG_NEW), cores()
    whole = CpuExecutors(threads).load(folder, 1, folder.model.blocks, pages=pages)
    load_s = time.perf_counter() - began
    variant = whole.backend
    whole.close()

    began = time.perf_counter()
    analyse(folder.model)
    split = uniform_split(folder.model.blocks, PARTS)
    split_s = time.perf_counter() - began

    kernels, began = load_kernels(threads), time.perf_counter()
    parts = [
        StageExecutor(folder, one.first, one.last, pages=pages, threads=threads, kernels=kernels, backend=variant)
        for one in split
    ]
    weights_s = time.perf_counter() - began
    began = time.perf_counter()
    wrong = [name for name in map(first_mismatch, parts) if name is not None]
    init_s = time.perf_counter() - began
    assert not wrong, f"{wrong} compute other bits here"
    return {"load_s": load_s, "split_s": split_s, "weights_s": weights_s, "init_s": init_s}


def measure(model: Path) -> dict[str, Any]:
    """Measures and returns all figures. Raises CalledProcessError when a command that measures fails."""
    folder = open_block_folder(model, blocks=[])
    loaded: dict[str, float] = json.loads(_output("-m", "bench.scenarios.distributor", "--model", str(model), "--load"))
    ids = ",".join(map(str, fixed_tokens(folder.model, PROMPT).tolist()))
    one, parted = (_generated(model, ids, stages) for stages in (1, PARTS))
    through = ["-m", "blockrelay_launcher", "bench", "--json", "--model", str(model), *BENCH_RUN.split()]
    bench = json.loads(_output("-P", *through))
    bench.pop("machine")
    totals = parted["totals"]
    return {
        **bench,
        "parts": PARTS,
        "threads": cores(),
        **loaded,
        "hop_s": one_way_s(folder.model.hidden_size),
        "copy_s": totals["state_transfer_s"] / totals["inferences"] / (PARTS - 1),
        "same": (one["tokens"], one["logprobs"]) == (parted["tokens"], parted["logprobs"]),
        "requests": REQUESTS,
    }


def _generated(model: Path, ids: str, stages: int) -> dict[str, Any]:
    options = f"--ids {ids} --max-tokens {NEW} --ignore-eos --logprobs 5 --stages {stages} --explain --json"
    return json.loads(_output("-m", "blockrelay_worker.offline.generate", "--model", str(model), *options.split()))


def _output(*arguments: str) -> str:
    """Returns what Python prints when it runs with these arguments."""
    return subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints the figures, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL, help="block folder; default: the bundled model")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--load", action="store_true", help="only load and split")
    chosen = parser.parse_args(arguments)
    if chosen.load:
        print(json.dumps(loading(chosen.model)))
        return 0
    figures = measure(chosen.model)
    if chosen.json:
        print(json.dumps(figures))
    else:
        print(plain(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
