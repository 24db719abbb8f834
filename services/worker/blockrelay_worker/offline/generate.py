"""`python -m blockrelay_worker.offline.generate`: continues a prompt in this process, without any service.

Text goes to stdout as it comes (token ids, for a model without a tokenizer). With `--json` one object is printed at the
end: model, precision, numerics_id, seed, prompt_tokens, tokens, text (null without a tokenizer), finish_reason ("stop"
or "length"), timings (seconds, and tokens per second), and logprobs if asked for. Exit code 2 and one line on stderr
for bad input, 1 for failures of ours or of the machine.

With `--explain` a table shows each stage's part in each step; totals and the whole text follow at the end. With
`--json` the object has them too, as steps and totals. The tokens are the same.

Without `--seed`, the seed derives from the prompt's ids: the same command gives the same text.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.command_app import run_app
from blockrelay.errors import BadRequest, UsageError
from blockrelay.host.cpu import check_threads, cores
from blockrelay.protocol.plan import CPU, GPU
from blockrelay.protocol.planned_split import ANY_GPU, equal_parts
from blockrelay.protocol.sampling_params import SamplingParams, check_prompt, derive_seed
from blockrelay.settings import BUNDLED_MODEL, WorkerSettings
from blockrelay.text.tokenizer import Tokenizer, VisibleText
from blockrelay_worker.execution.loader import gpu_of
from blockrelay_worker.execution.process.executors import Gpu
from blockrelay_worker.offline.explanation import heading, step_lines, step_records, totals
from blockrelay_worker.offline.pipeline import Generated, Pipeline, PipelineStep, generate

DEFAULT_MAX_TOKENS = 128

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def main(
    model: Annotated[
        Path, typer.Option(help="block folder [default: the bundled model]", show_default=False)
    ] = BUNDLED_MODEL,
    prompt: Annotated[str | None, typer.Option(help="text to continue")] = None,
    ids: Annotated[str | None, typer.Option(help="token ids to continue, with commas")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help=f"new tokens at most [default: {DEFAULT_MAX_TOKENS}, or what the context holds]")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token")] = 0.0,
    top_k: Annotated[int, typer.Option(help="sample from the k most likely tokens; 0: all")] = 0,
    top_p: Annotated[float, typer.Option(help="then from the fewest that reach this probability; 1: all")] = 1.0,
    min_p: Annotated[float, typer.Option(help="then from those this likely relative to the best; 0: all")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="[default: derived from the prompt]")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="end the text before this string; may be repeated")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="go on after the model's end token")] = False,
    no_kv_cache: Annotated[
        bool, typer.Option("--no-kv-cache", help="compute every step from the first token on; the text is the same")
    ] = False,
    logprobs: Annotated[int | None, typer.Option(help="with --json: log probabilities of the n best tokens")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, callback=check_threads, help="[default: the cores of this machine]")
    ] = None,
    stages: Annotated[int, typer.Option(min=1, help="cut the model into this many stages")] = 1,
    gpu: Annotated[
        str, typer.Option(metavar="ID", help="run on this device, such as webgpu:0 (see: blockrelay devices)")
    ] = "",
    stage_devices: Annotated[
        str, typer.Option(metavar="CLASSES", help="with --gpu: gpu or cpu for each stage, such as cpu,gpu")
    ] = "",
    explain: Annotated[
        bool, typer.Option("--explain", help="show what each stage did in each step, with times, and totals")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of the text")] = False,
) -> None:
    """Continue a prompt with a block folder's model."""
    started = time.perf_counter()
    if (prompt is None) == (ids is None):
        raise UsageError("give either --prompt or --ids")
    params = SamplingParams(
        max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        use_cache=not no_kv_cache,
    )
    if params.max_tokens == 0:
        raise BadRequest("max_tokens must be at least 1", param="max_tokens")
    folder = open_block_folder(model)
    tokenizer = Tokenizer.from_file(folder.tokenizer_path) if folder.tokenizer_path is not None else None
    tokens = _prompt_tokens(prompt, ids, tokenizer)
    if stop and tokenizer is None:
        raise BadRequest("the model has no tokenizer, so it cannot look for stop strings", param="stop")
    if tokenizer is not None:
        params = replace(params, stop_token_ids=tokenizer.stop_ids(params.stop))
    device = _device(folder, stages, gpu, stage_devices, threads or cores())
    params = _checked(params, tokens, folder, "prompt" if ids is None else "ids", explicit=max_tokens is not None)

    pipeline = Pipeline(
        folder, stages=stages, threads=threads or cores(), tokens=len(tokens) + params.max_tokens, gpu=device,
        stage_devices=stage_devices,
    )  # fmt: skip
    load_s = time.perf_counter() - started
    text = _Text(tokenizer, params, folder, tokens, stream=not as_json and not explain)
    steps = _Steps(tokenizer, show=explain and not as_json)
    used_seed = derive_seed(",".join(map(str, tokens))) if seed is None else seed
    numerics = pipeline.numerics
    try:
        steps.begin(len(tokens))
        result = generate(
            pipeline, tokens, params, seed=used_seed, tokenizer=tokenizer, on_token=text.push,
            on_step=steps.add if explain else None,
        )  # fmt: skip
    finally:
        pipeline.close()
    text.finish()
    if as_json:
        report = _report(folder, params, used_seed, len(tokens), result, text.all, load_s, numerics)
        if explain:
            report |= {"steps": step_records(steps.all, tokenizer), "totals": totals(steps.all).record()}
        typer.echo(json.dumps(report))
    elif explain:
        shown = " ".join(map(str, result.tokens)) if text.all is None else text.all
        typer.echo("\n".join([*totals(steps.all).lines(), shown]))


def _device(folder: BlockFolder, stages: int, gpu: str, stage_devices: str, threads: int) -> Gpu | None:
    """The device of `--gpu` that runs stages; None: our own kernels run all of them.

    Raises UsageError for options that contradict each other or do not fit the model.
    """
    if stages > folder.model.blocks:
        raise UsageError(f"stages must be at most {folder.model.blocks}, the number of blocks, not {stages}")
    planned = equal_parts(folder.model.blocks, stages, stage_devices=stage_devices)
    if folder.model.onnx_blocks is not None and stages > 1:
        raise UsageError(f"{stages} stages: `generate` runs ONNX blocks as they are in one")
    on_gpu = [ANY_GPU in devices for devices in planned.devices]
    if not gpu and any(on_gpu):
        raise UsageError(f"--stage-devices {stage_devices}: say which device with --gpu")
    if gpu and stage_devices and not any(on_gpu):
        raise UsageError(f"--stage-devices {stage_devices}: no stage is for --gpu {gpu}")
    settings = {
        "device": GPU if gpu else CPU,
        "gpu": gpu,
        "threads": threads,
        "sequential": False,
        "imported_model": None,
    }
    return gpu_of(WorkerSettings().model_copy(update=settings), folder)


class _Steps:
    """Collects the steps for `--explain` and, with `show`, prints each as it comes."""

    def __init__(self, tokenizer: Tokenizer | None, *, show: bool) -> None:
        self._tokenizer, self._show = tokenizer, show
        self.all: list[PipelineStep] = []

    def begin(self, prompt_tokens: int) -> None:
        self._print(heading(prompt_tokens))

    def add(self, step: PipelineStep) -> None:
        self.all.append(step)
        self._print(step_lines(len(self.all), step, self._tokenizer))

    def _print(self, lines: Sequence[str]) -> None:
        if self._show:
            typer.echo("\n".join(lines))


class _Text:
    """Collects the text of the new tokens and, with `stream`, prints it as it comes."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        folder: BlockFolder,
        prompt: Sequence[int],
        *,
        stream: bool,
    ) -> None:
        self._visible = None if tokenizer is None else VisibleText(tokenizer, params, folder.model.eos_ids, prompt)
        self._stream = stream
        self._parts: list[str] = []

    @property
    def all(self) -> str | None:
        return None if self._visible is None else "".join(self._parts)

    def push(self, token: int) -> None:
        self._add(f"{token} " if self._visible is None else self._visible.push(token))

    def finish(self) -> None:
        self._add("" if self._visible is None else self._visible.finish())
        if self._stream:
            typer.echo("")

    def _add(self, text: str) -> None:
        self._parts.append(text)
        if self._stream and text:
            typer.echo(text, nl=False)
            sys.stdout.flush()


def _prompt_tokens(prompt: str | None, ids: str | None, tokenizer: Tokenizer | None) -> list[int]:
    if ids is not None:
        try:
            return [int(part) for part in ids.split(",")]
        except ValueError:
            raise BadRequest("ids must be whole numbers with commas between them, like 1,15,7", param="ids") from None
    if tokenizer is None:
        raise BadRequest("the model has no tokenizer: give --ids instead of --prompt", param="prompt")
    return tokenizer.encode(prompt or "")


def _checked(
    params: SamplingParams, tokens: list[int], folder: BlockFolder, param: str, *, explicit: bool
) -> SamplingParams:
    """Checks that the model can run the request; returns `params`, with a default max_tokens reduced to the context.

    Raises BadRequest.
    """
    model = folder.model
    if not explicit:
        params = replace(params, max_tokens=max(1, min(params.max_tokens, model.max_position - len(tokens))))
    check_prompt(tokens, params, vocab_size=model.vocab_size, context=model.max_position, param=param)
    return params


def _report(
    folder: BlockFolder,
    params: SamplingParams,
    seed: int,
    prompt_tokens: int,
    result: Generated,
    text: str | None,
    load_s: float,
    numerics: str,
) -> dict[str, Any]:
    new = len(result.sampled)
    later = result.total_s - result.first_token_s
    report: dict[str, Any] = {
        "model": folder.model.name,
        "precision": folder.manifest.precision,
        "numerics_id": numerics,
        "seed": seed,
        "prompt_tokens": prompt_tokens,
        "tokens": result.tokens,
        "text": text,
        "finish_reason": result.finish_reason,
        "timings": {
            "load_s": load_s,
            "first_token_s": result.first_token_s,
            "total_s": result.total_s,
            "prompt_tokens_per_s": prompt_tokens / result.first_token_s,
            "decode_tokens_per_s": (new - 1) / later if new > 1 else None,
            "block_s": result.block_s,
        },
    }
    if params.logprobs is not None:
        report["logprobs"] = [
            {"token": one.token, "logprob": one.logprob, "top": [list(pair) for pair in one.top]}
            for one in result.sampled
        ]
    return report


def run(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code (see `run_app`). `arguments`: None takes those of the process."""
    return run_app(app, arguments, name="blockrelay generate")


if __name__ == "__main__":
    sys.exit(run())
