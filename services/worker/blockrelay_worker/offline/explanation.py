"""The output of `blockrelay generate --explain`: a line for each stage of each step, and totals. Pure."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from blockrelay.protocol.plan import GPU, split_text
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_worker.execution.loader import CPU_PROVIDER
from blockrelay_worker.offline.pipeline import PipelineStep, StageRun

_HEAD = ("step", "stage", "device", "blocks", "input", "output", "transfer", "compute", "KV", "token")
#: Widths of the table's columns; the last one, the token, has no width.
_WIDTHS = (4, 5, 10, 7, 11, 11, 9, 9, 7)
_LEFT = ("device", "blocks", "input", "output")
#: Characters of a token's text that are shown.
_SHOWN = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """Sums over all steps of one request, in seconds, named as `blockrelay status` names a worker's.

    `inferences` is the number of steps. `inference_s` is the time of the blocks alone, `token_generation_s` that of
    sampling, `state_transfer_s` that of moving rows, `cache_management_s` that of finding KV pages, `total_s` that of
    the steps. `first_token_s` includes the prompt.
    """

    inferences: int
    inference_s: float
    token_generation_s: float
    state_transfer_s: float
    cache_management_s: float
    total_s: float
    prompt_tokens: int
    tokens: int
    first_token_s: float

    @property
    def other_s(self) -> float:
        """Seconds of the steps in no other sum: checks of rows, buffers for new shapes, Python between stages."""
        parts = self.inference_s + self.token_generation_s + self.state_transfer_s + self.cache_management_s
        return self.total_s - parts

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second, the prompt's time included."""
        return self.tokens / self.total_s

    @property
    def next_token_s(self) -> float | None:
        """Mean seconds of a token after the first; None if there is only one."""
        later = self.total_s - self.first_token_s
        return later / (self.tokens - 1) if self.tokens > 1 else None

    def record(self) -> dict[str, Any]:
        """The totals as a JSON object."""
        derived = {"other_s": self.other_s, "next_token_s": self.next_token_s, "tokens_per_s": self.tokens_per_s}
        return asdict(self) | derived

    def lines(self) -> list[str]:
        """The totals as lines of text, times in milliseconds."""
        parts = (
            ("compute", self.inference_s),
            ("transfer", self.state_transfer_s),
            ("KV", self.cache_management_s),
            ("sampling", self.token_generation_s),
            ("other", self.other_s),
        )
        shown = ", ".join(f"{name} {1000 * seconds:.3f}" for name, seconds in parts)
        later = "" if self.next_token_s is None else f", then {1000 * self.next_token_s:.3f} ms each"
        return [
            f"total {1000 * self.total_s:.3f} ms: {shown}",
            f"{self.tokens} tokens in {self.inferences} steps, {self.tokens_per_s:.1f} tokens/s; first token after "
            f"{1000 * self.first_token_s:.3f} ms{later}",
        ]


def totals(steps: Sequence[PipelineStep]) -> StepTotals:
    """Sums the times of one request's steps (at least one); the first one reads the prompt."""
    runs = [run for step in steps for run in step.runs]
    return StepTotals(
        inferences=len(steps),
        inference_s=sum(run.compute_s for run in runs),
        token_generation_s=sum(step.sampling_s for step in steps),
        state_transfer_s=sum(run.transfer_s for run in runs),
        cache_management_s=sum(run.kv_s for run in runs),
        total_s=sum(step.total_s for step in steps),
        prompt_tokens=steps[0].rows,
        tokens=len(steps),
        first_token_s=steps[0].total_s,
    )


def step_records(steps: Sequence[PipelineStep], tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """The steps as JSON objects, times in seconds."""
    return [
        {
            "step": number,
            "rows": step.rows,
            "token": step.token,
            "text": token_text(step.token, tokenizer),
            "sampling_s": step.sampling_s,
            "total_s": step.total_s,
            "stages": [_run_record(run) for run in step.runs],
        }
        for number, step in enumerate(steps, start=1)
    ]


def _run_record(run: StageRun) -> dict[str, Any]:
    return {
        "stage": run.stage,
        "class": run.device_class,
        "device": run.device,
        "blocks": split_text((run.blocks,)),
        "input": list(run.taken),
        "output": list(run.given),
        "transfer_s": run.transfer_s,
        "compute_s": run.compute_s,
        "kv_s": run.kv_s,
        "total_s": run.total_s,
    }


def heading(prompt_tokens: int) -> list[str]:
    """The lines above the table."""
    return [f"step 1 reads the prompt of {prompt_tokens} tokens; transfer, compute and KV in ms", _line(_HEAD)]


def step_lines(number: int, step: PipelineStep, tokenizer: Tokenizer | None) -> list[str]:
    """The table's lines for step `number`, one for each run of a stage; the last one shows the token."""
    lines: list[str] = []
    for index, run in enumerate(step.runs):
        cells = (
            str(number) if index == 0 else "",
            str(run.stage),
            _device(run),
            split_text((run.blocks,)),
            str(list(run.taken)),
            str(list(run.given)),
            *(f"{1000 * seconds:.3f}" for seconds in (run.transfer_s, run.compute_s, run.kv_s)),
            _token(step.token, tokenizer) if index == len(step.runs) - 1 else "",
        )
        lines.append(_line(cells))
    return lines


def token_text(token: int, tokenizer: Tokenizer | None) -> str | None:
    """The text of one token by itself; None without a tokenizer."""
    return None if tokenizer is None else tokenizer.token_bytes(token).decode(errors="replace")


def _token(token: int, tokenizer: Tokenizer | None) -> str:
    text = token_text(token, tokenizer)
    if text is None:
        return str(token)
    return f"{token} {json.dumps(text[:_SHOWN], ensure_ascii=False)}"


def _device(run: StageRun) -> str:
    """The device's name. ONNX Runtime on the CPU is shown as a device: its bits differ from those of our kernels."""
    return "cpu device" if run.device_class == GPU and run.device == CPU_PROVIDER else run.device


def _line(cells: Sequence[str]) -> str:
    *columns, last = cells
    shown = (
        cell.ljust(width) if name in _LEFT else cell.rjust(width)
        for name, cell, width in zip(_HEAD, columns, _WIDTHS, strict=False)
    )
    return "  ".join([*shown, last]).rstrip()
