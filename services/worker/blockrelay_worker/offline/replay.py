"""`python -m blockrelay_worker.offline.replay --request ID < BODY`: runs a dead letter again, alone in this process.

BODY is an encoded RequestBody. Tokens go to stdout as text while they come (as ids, for a model without a tokenizer),
so that the output shows how far a failing request comes; a line behind them says whether they are those that were
committed. A tensor step has no tokens: its prompt runs, and one line says that its logits are finite. Ends with code 0
when the request completes, 1 when it fails or BODY is malformed, 2 when the model cannot take the request. If the
request kills workers, it ends as its worker did.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from blockrelay import failpoints
from blockrelay.block_folder.folder import open_block_folder
from blockrelay.command_app import run_app
from blockrelay.host.cpu import check_threads, cores
from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.sampling_params import SamplingParams, check_prompt, derive_seed
from blockrelay.settings import BUNDLED_MODEL, WorkerSettings
from blockrelay.text.tokenizer import IncrementalText, Tokenizer
from blockrelay_worker.offline.pipeline import CHUNK_ROWS, Pipeline, generate

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def main(
    request: Annotated[
        str, typer.Option(help="id of the request: its seed derives from it, unless the request names one")
    ],
    model: Annotated[Path, typer.Option(help="block folder")] = BUNDLED_MODEL,
    committed: Annotated[str, typer.Option(help="its first tokens, as they were committed: ids with commas")] = "",
    threads: Annotated[
        int | None, typer.Option(min=1, callback=check_threads, help="[default: the cores of this machine]")
    ] = None,
) -> None:
    """Run the request whose body is on stdin."""
    failpoints.arm("worker", WorkerSettings().failpoint)
    folder, body = open_block_folder(model), RequestBody.decode(sys.stdin.buffer.read())
    params, prompt = SamplingParams.from_dict(body.params), body.prompt.tolist()
    check_prompt(prompt, params, vocab_size=folder.model.vocab_size, context=folder.model.max_position, param="prompt")
    tokenizer = Tokenizer.from_file(folder.tokenizer_path) if folder.tokenizer_path is not None else None
    pipeline = Pipeline(folder, stages=1, threads=threads or cores(), tokens=len(prompt) + params.max_tokens)
    if body.logits != "none":
        for first in range(0, len(prompt), CHUNK_ROWS):
            pipeline.run(prompt[first : first + CHUNK_ROWS], first)
        typer.echo(f"a tensor step: its {len(prompt)} tokens have finite logits")
        return

    text = None if tokenizer is None else IncrementalText(tokenizer, prompt)
    came: list[int] = []

    def show(token: int) -> None:
        came.append(token)
        typer.echo(f"{token} " if text is None else text.push(token), nl=False)
        sys.stdout.flush()

    seed = derive_seed(request) if params.seed is None else params.seed
    try:
        done = generate(pipeline, prompt, params, seed=seed, tokenizer=tokenizer, on_token=show)
        ended = f"{len(done.tokens)} tokens, then it ended ({done.finish_reason})"
        typer.echo(f"{'' if text is None else text.finish()}\n{ended}")
    finally:
        if committed:
            then = [int(token) for token in committed.split(",")]
            typer.echo(f"\nunder {pipeline.numerics} {compared(then, came)}")


def compared(then: Sequence[int], now: Sequence[int]) -> str:
    """Says where the tokens that came differ from the committed ones, as far as both go."""
    both = min(len(then), len(now))
    for place, (old, new) in enumerate(zip(then[:both], now[:both], strict=True)):
        if old != new:
            return f"token {place} is {new} and was {old}; those before it are the same"
    return f"the first {both} tokens are those of then"


if __name__ == "__main__":
    sys.exit(run_app(app, name="python -m blockrelay_worker.offline.replay"))
