"""Computes steps of a whole model without end, as a neighbour that takes part of this machine.

`python -m bench.neighbour DIR --threads 1 --speed 0.5` computes at half of the machine's speed, and prints `ready` when
it begins.
"""

import argparse
import random
import sys
from pathlib import Path

from blockrelay.block_folder.folder import open_block_folder
from blockrelay_launcher.bench.figures import random_prompts
from blockrelay_worker.execution.fault_injection import SlowedExecutor
from blockrelay_worker.execution.loader import executors_for
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.offline.bench import run_round
from blockrelay_worker.sampling.row_sampler import sampler_of

REQUESTS, PROMPT, NEW = 8, 64, 64


def main() -> None:
    """Loads the model and computes until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="block folder")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--speed", type=float, default=1.0, help="share of the machine's speed, at most 1")
    chosen = parser.parse_args()
    folder = open_block_folder(chosen.model)
    executors = executors_for(folder, threads=chosen.threads)
    own = executors.load(folder, 1, folder.model.blocks, pages=REQUESTS * pages_for(PROMPT + NEW))
    executor = SlowedExecutor(own, speed=chosen.speed)
    sampler = sampler_of(load_kernels(chosen.threads))
    prompts = random_prompts(random.Random(7), folder.model.vocab_size, REQUESTS, PROMPT)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        run_round(executor, sampler, prompts, NEW, max_rows=REQUESTS)


if __name__ == "__main__":
    main()
