"""SGLang's benchmark, as it comes."""

import json
import tempfile
from pathlib import Path

from tests.clients.python.counting import command, counting
from tests.clients.python.harness import Target, case, run

REQUESTS, NEW = 4, 12


def benchmark(target: Target, backend: str) -> None:
    with tempfile.TemporaryDirectory() as folder, counting(target) as counted:
        report = Path(folder) / "report.jsonl"
        command(
            "--backend", backend, "--base-url", target.url, "--model", target.model, "--tokenizer", target.tokenizer,
            "--dataset-name", "random-ids", "--random-input-len", "20", "--random-output-len", str(NEW),
            "--random-range-ratio", "1", "--num-prompts", str(REQUESTS), "--warmup-requests", "0",
            "--output-file", str(report),
            of=("sglang.bench_serving",),
        )  # fmt: skip
        told = json.loads(report.read_text())
    assert told["completed"] == REQUESTS and told["total_output_tokens"] == REQUESTS * NEW == counted.new


@case
def completions(target: Target) -> None:
    benchmark(target, "vllm")


@case
def chat(target: Target) -> None:
    benchmark(target, "vllm-chat")


if __name__ == "__main__":
    run()
