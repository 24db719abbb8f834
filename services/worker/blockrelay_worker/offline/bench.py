"""`python -m blockrelay_worker.offline.bench`: times the executor in this process, without queue, Redis and HTTP.

`blockrelay bench` compares services with it. Each line on stdin is one round with all its requests:
{"prompts": [[id, ...], ...], "new": n, "temperature": t, "top_p": p}. Each line on stdout answers one:
{"sent": s, "tokens": [[s, ...], ...]}, the times when the round began and when each request's tokens came, in seconds
of the monotonic clock. The first line on stdout, `ready`, comes when the model is loaded and checked. Ends when stdin
ends.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.command_app import run_app
from blockrelay.errors import RowNotFinite
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.loader import executors_for
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.sampling.row_sampler import Sampler, sampler_of
from blockrelay_worker.sampling.sampler import Draw
from blockrelay_worker.scheduling.batch_policy import Candidate, choose_tokens

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@dataclass(slots=True)
class Timed:
    """One request of a round."""

    seed: int
    tokens: list[int]
    """All tokens so far, prompt first."""
    pages: list[int]
    """Ids of its KV pages, for the prompt and all new tokens."""
    left: int
    """New tokens still to be generated."""
    computed: int = 0
    """Leading tokens whose KV is in `pages`."""
    last_step: int = 0
    """Number of the last step in which it had rows, from 1; 0: none yet."""
    came: list[float] = field(default_factory=list[float])
    """When each new token came, in seconds of the monotonic clock."""


def run_round(
    executor: Executor,
    sampler: Sampler,
    prompts: Sequence[Sequence[int]],
    new: int,
    *,
    max_rows: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
) -> tuple[float, list[Timed]]:
    """Runs all prompts together until each has `new` >= 1 tokens; returns the start time and the requests.

    Each request has its index as its seed.

    `executor` has the whole model. Batches are those of a worker: at most `max_rows` rows, decode rows first. Raises
    OutOfPages if the executor's pool is too small for all requests together, RowNotFinite if the model overflows.
    """
    pool, params = executor.pool, SamplingParams(max_tokens=new, temperature=temperature, top_p=top_p, ignore_eos=True)
    started = time.monotonic()
    requests = [
        Timed(seed, list(prompt), pool.allocate(pages_for(len(prompt) + new)), new)
        for seed, prompt in enumerate(prompts)
    ]
    iteration = 0
    while running := {str(i): one for i, one in enumerate(requests) if one.left}:
        iteration += 1
        candidates = [Candidate(name, len(r.tokens) - r.computed, last_step=r.last_step) for name, r in running.items()]
        chosen = [(running[name], rows) for name, rows in choose_tokens(candidates, max_rows)]
        ends = np.cumsum([rows for _, rows in chosen])
        sampling = [
            (r, int(end) - 1) for (r, n), end in zip(chosen, ends, strict=True) if r.computed + n == len(r.tokens)
        ]
        output = executor.run(
            Batch(
                segments=[Segment(rows=n, first_position=r.computed, pages=r.pages) for r, n in chosen],
                tokens=np.concatenate([np.asarray(r.tokens[r.computed : r.computed + n], np.int32) for r, n in chosen]),
                wanted=[row for _, row in sampling],
            )
        )
        for request, rows in chosen:
            request.computed += rows
            request.last_step = iteration
        assert output.logits is not None
        if output.not_finite:
            raise RowNotFinite("a row is not finite: the model overflowed")
        draws = [Draw(row, params, r.seed, len(r.tokens)) for (r, _), row in zip(sampling, output.logits, strict=True)]
        for (request, _), sampled in zip(sampling, sampler(draws), strict=True):
            request.tokens.append(sampled.token)
            request.left -= 1
            request.came.append(time.monotonic())
    for request in requests:
        pool.free(request.pages)
    return started, requests


@app.command()
def main(
    model: Annotated[Path, typer.Option()],
    threads: Annotated[int, typer.Option()],
    max_rows: Annotated[int, typer.Option()],
    pages: Annotated[int, typer.Option(help="pages that the largest round needs")],
) -> None:
    """Run the rounds on stdin."""
    folder = open_block_folder(model)
    executor = executors_for(folder, threads=threads).load(folder, 1, folder.model.blocks, pages=pages)
    sampler = sampler_of(load_kernels(threads))
    _answer("ready")
    for line in sys.stdin:
        fields: Any = json.loads(line)
        sent, requests = run_round(executor, sampler, max_rows=max_rows, **fields)
        _answer(json.dumps({"sent": sent, "tokens": [request.came for request in requests]}))


def _answer(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(run_app(app, name="python -m blockrelay_worker.offline.bench"))
