"""What the ONNX executor computes, beside the formulas in float64 and the executor for CPUs."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay_converter.convert import convert
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.cpu.loading import CpuExecutors
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.onnx.loading import OnnxExecutors
from blockrelay_worker.execution.onnx.providers.opening import open_provider
from tests.support.models.checkpoints import Family, write_checkpoint
from tests.support.worker.float64_oracle import oracle_logits
from tests.support.worker.onnx_devices import FLOAT16

#: Of logits up to 5, by what was computed with: twenty spacings of such floats, four times what was measured; eight of
#: such float16s, where 0.021 was measured.
LOGIT_ERRORS = {"float32": 1e-5, "float16": 0.03}
#: A model and the last blocks of its stages.
MODELS: Sequence[tuple[Family, str, Sequence[int]]] = [
    ("llama", "fp32", [5]),
    ("llama", "fp32", [1, 4, 5]),
    ("qwen2", "fp32", [2, 5]),
    ("qwen3", "fp32", [5]),
    ("llama", "w8a8", [5]),
    ("llama", "fp16", [5]),
    ("llama", "w4a8,block_2=fp32,block_3=w8a8", [5]),
]
PROMPTS, STEPS = 20, 64

#: Tokens, first position and pages of each request in each step: A, B and C by their pages.
Part = tuple[Sequence[int], int, Sequence[int]]


def converted(root: Path, family: Family, precision: str) -> BlockFolder:
    """Four layers, 64 wide, logits with a standard deviation of 1; the head of a Qwen is its embedding."""
    write_checkpoint(root / "checkpoint", seed=3, family=family, head_gain=1, tie_word_embeddings=family == "qwen2")
    convert(root / "checkpoint", root / "folder", precision=precision, report=lambda *_: None, name="tiny")
    return open_block_folder(root / "folder")


def run(stages: Sequence[Executor], parts: Sequence[Part]) -> NDArray[np.float32]:
    """Logits of all rows of a batch, by stages one after the other."""
    segments = [Segment(rows=len(tokens), first_position=first, pages=pages) for tokens, first, pages in parts]
    tokens, hidden = np.array([token for part, _, _ in parts for token in part], np.int32), None
    for stage in stages:
        first = stage.takes_tokens
        batch = Batch(
            segments=segments,
            tokens=tokens if first else None,
            hidden=None if first else hidden,
            wanted=range(tokens.size),
        )
        output = stage.run(batch)
        if output.logits is not None:
            return output.logits.copy()
        hidden = output.hidden
    raise AssertionError("no stage has the head")


@pytest.mark.parametrize(
    ("device", "dtype", "family", "precision", "ends"),
    [
        *(("cpu", "float32", *model) for model in MODELS),
        *(pytest.param("webgpu:0", "float32", *model, marks=pytest.mark.software_gpu) for model in MODELS[2:4]),
        *(
            pytest.param("webgpu:0", "float32", *model, marks=(pytest.mark.software_gpu, pytest.mark.driver_on_cpu))
            for model in (MODELS[4], MODELS[6])
        ),
        *(
            pytest.param("webgpu:0", "float16", family, precision, ends, marks=FLOAT16)
            for family, precision, ends in (
                ("llama", "w8a8", [5]),
                ("llama", "w4a8,block_2=w8a8", [5]),
                ("qwen2", "fp16", [2, 5]),
                ("qwen3", "fp16", [5]),
            )
        ),
    ],
)
def test_a_ragged_batch_on_scattered_pages_is_what_the_formulas_say(
    tmp_path: Path, device: str, dtype: str, family: Family, precision: str, ends: Sequence[int]
) -> None:
    folder = converted(tmp_path, family, precision)
    starts = [1, *(end + 1 for end in ends[:-1])]
    executors = OnnxExecutors(open_provider(device))
    stages = [executors.load(folder, *part, pages=12) for part in zip(starts, ends, strict=True)]
    assert {stage.details["dtype"] for stage in stages} == {dtype}
    random = np.random.default_rng(3)
    a, b, c = (random.integers(3, folder.model.vocab_size, count).tolist() for count in (70, 23, 9))
    right_a, right_b, right_c = (oracle_logits(folder, tokens) for tokens in (a, b, c))
    of_a, of_b, of_c = [0, 5, 2, 4, 8], [7, 3], [9]
    steps: list[tuple[list[Part], list[NDArray[np.float64]]]] = [
        ([(a[:17], 0, of_a), (b[:3], 0, of_b)], [right_a[:17], right_b[:3]]),
        ([(a[17:18], 17, of_a), (b[3:20], 3, of_b), (c, 0, of_c)], [right_a[17:18], right_b[3:20], right_c]),
        ([(a[18:], 18, of_a), (b[20:21], 20, of_b)], [right_a[18:], right_b[20:21]]),
        ([(b[21:22], 21, of_b)], [right_b[21:22]]),
        ([(b[22:], 22, of_b)], [right_b[22:]]),
    ]
    errors = [float(np.abs(run(stages, parts) - np.concatenate(right)).max()) for parts, right in steps]
    assert max(errors) <= LOGIT_ERRORS[dtype], errors


@pytest.mark.parametrize("device", ["cpu", pytest.param("webgpu:0", marks=FLOAT16)])
def test_a_cpu_goes_on_from_the_pages_of_a_device(tmp_path: Path, device: str) -> None:
    # Given 40 tokens of a model in float16, on a device and on a CPU
    folder = converted(tmp_path, "qwen3", "fp16")
    there, here = (
        executors.load(folder, 1, 5, pages=12) for executors in (OnnxExecutors(open_provider(device)), CpuExecutors(1))
    )
    tokens = np.random.default_rng(4).integers(3, folder.model.vocab_size, 60).tolist()
    for stage in (there, here):
        run([stage], [(tokens[:40], 0, [3, 1, 5])])
    # When the CPU goes on from the device's pages, then its logits are close to those from its own
    here.import_pages([7, 2, 9], there.export_pages([3, 1, 5]))
    own, taken = (run([here], [(tokens[40:], 40, pages)]) for pages in ([3, 1, 5, 0], [7, 2, 9, 4]))
    assert 0 < np.abs(own - taken).max() <= LOGIT_ERRORS["float16"]


def greedy(executor: Executor, prompts: Sequence[Sequence[int]], steps: int) -> tuple[list[list[int]], float]:
    """The tokens of each prompt's answer, all prompts in one batch; the smallest lead that one had on the next best."""
    pages = 6
    texts, done, lead = [list(prompt) for prompt in prompts], [0] * len(prompts), np.inf
    for _ in range(steps):
        parts = [
            (text[at:], at, range(i * pages, (i + 1) * pages))
            for i, (text, at) in enumerate(zip(texts, done, strict=True))
        ]
        last = np.cumsum([len(tokens) for tokens, _, _ in parts]) - 1
        done = [len(text) for text in texts]
        rows = run([executor], parts)[last]
        best = np.sort(rows, axis=1)[:, -2:]
        lead = min(lead, float((best[:, 1] - best[:, 0]).min()))
        for text, token in zip(texts, rows.argmax(axis=1).tolist(), strict=True):
            text.append(token)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)], lead


def test_greedy_answers_are_those_of_the_executor_for_cpus(fp32: BlockFolder) -> None:
    random = np.random.default_rng(7)
    prompts = [random.integers(3, fp32.model.vocab_size, 5 + index).tolist() for index in range(PROMPTS)]
    blocks, pages = fp32.model.blocks, 6 * PROMPTS
    expected, lead = greedy(CpuExecutors(1).load(fp32, 1, blocks, pages=pages), prompts, STEPS)
    assert lead > 1e-4, "errors of 1e-5 could decide"
    executors = OnnxExecutors(open_provider("cpu"))  # SwiftShader takes half a minute
    assert greedy(executors.load(fp32, 1, blocks, pages=pages), prompts, STEPS)[0] == expected
