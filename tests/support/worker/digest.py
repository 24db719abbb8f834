"""Bits of a whole model on this CPU: `python -m tests.support.worker.digest MODEL [STAGES] [THREADS]` prints JSON.

`kernels` and `products` are the variants that this CPU got; the rest must be the same everywhere: `logits`, the
SHA-256 of every logit of some ragged batches, and `tokens` of a greedy and a sampled request. Needs the worker's
packages only, so that it runs under an emulator as it is.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.protocol.plan import uniform_split
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.cpu.linears import Backend
from blockrelay_worker.execution.cpu.loading import load_stage
from blockrelay_worker.execution.cpu.stage import StageExecutor
from blockrelay_worker.execution.numerics_id import numerics_id
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.offline.pipeline import Pipeline, generate

#: Batches of (request, rows): prompts cut in every way, decode rows among them; 40 positions per request.
SCHEDULE = (
    ((0, 17),),
    ((1, 1), (0, 1)),
    ((2, 40), (0, 5), (1, 16)),
    ((1, 15), (0, 1), (3, 33)),
    ((3, 1), (1, 1), (0, 16)),
    ((3, 6), (1, 7)),
)
PAGES_EACH = 3


def logits_digest(
    folder: BlockFolder, *, stages: int, threads: int, kernels_named: str | None = None, products: Backend | None = None
) -> tuple[str, str, str]:
    """(kernel variant, product variant, digest); the variants are those that this CPU gets, or the named ones."""
    kernels = load_kernels(threads, isa=kernels_named)
    executors: list[StageExecutor] = []
    for stage in uniform_split(folder.model.blocks, stages):
        first, last = stage.first, stage.last
        pages = 4 * PAGES_EACH
        if products is None:
            executors.append(load_stage(folder, first, last, pages=pages, threads=threads, kernels=kernels))
        else:
            executors.append(
                StageExecutor(folder, first, last, pages=pages, threads=threads, kernels=kernels, backend=products)
            )
    done, digest = [0] * 4, hashlib.sha256()
    for step in SCHEDULE:
        segments: list[Segment] = []
        tokens: list[int] = []
        for request, rows in step:
            pages = range(request * PAGES_EACH, (request + 1) * PAGES_EACH)
            segments.append(Segment(rows=rows, first_position=done[request], pages=pages))
            tokens += [_token(folder, request, done[request] + i) for i in range(rows)]
            done[request] += rows
        hidden = logits = None
        for executor in executors:
            ids = np.array(tokens, np.int32) if executor.takes_tokens else None
            output = executor.run(Batch(segments=segments, tokens=ids, hidden=hidden, wanted=range(len(tokens))))
            assert not output.not_finite
            hidden, logits = output.hidden, output.logits
        assert logits is not None
        digest.update(logits.astype("<f4").tobytes())
    return kernels.isa, executors[0].backend, digest.hexdigest()


def _token(folder: BlockFolder, request: int, position: int) -> int:
    return 2 + (7919 * request + 104729 * position) % (folder.model.vocab_size - 2)


def new_tokens(folder: BlockFolder, *, stages: int, threads: int) -> list[list[int]]:
    """Of `generate`, which is what the command runs: one greedy request and one that uses all of the sampler."""
    prompt = [_token(folder, 5, i) for i in range(21)]
    greedy = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    sampled = SamplingParams(
        max_tokens=24, temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, ignore_eos=True, logprobs=2
    )
    pipeline = Pipeline(folder, stages=stages, threads=threads, tokens=64)
    return [generate(pipeline, prompt, params, seed=11, tokenizer=None).tokens for params in (greedy, sampled)]


def main(model: str, stages: int = 1, threads: int = 1) -> None:
    folder = open_block_folder(Path(model))
    kernels, products, digest = logits_digest(folder, stages=stages, threads=threads)
    found = {
        "kernels": kernels,
        "products": products,
        "numerics": numerics_id(folder.manifest),
        "logits": digest,
        "tokens": new_tokens(folder, stages=stages, threads=threads),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
