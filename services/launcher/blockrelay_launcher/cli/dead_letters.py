"""The command `blockrelay dead-letters`: lists, shows, replays and removes requests that could not be computed.

A request becomes a dead letter when it killed its workers or failed otherwise.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, cast

import redis
import typer
from rich.console import Console
from rich.table import Column, Table

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.errors import UsageError, WireError
from blockrelay.host.child_command import module_command
from blockrelay.protocol.encoding import codec
from blockrelay.protocol.encoding.request_ids import own_id
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.records.provenance import Ran, provenance
from blockrelay.redis.cell_address import CellAddress, connected
from blockrelay.typed_command import typed
from blockrelay_launcher.cli.cell_options import CellOptions
from blockrelay_launcher.option_groups import with_option_groups

app = typer.Typer(
    name="dead-letters", no_args_is_help=True, help="List, show, replay and remove requests that could not be computed."
)

Letter = Annotated[str, typer.Argument(metavar="ID", help="Id of the request: req-..., cmpl-... or chatcmpl-...")]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """One request that could not be computed, as its entry in the Redis stream of dead letters."""

    entry: str
    """Id of the stream entry; it begins with the time in milliseconds."""
    request_id: str
    """Id of the request."""
    why: str
    """`poison` (it ended its workers), `row_not_finite` or `execution_error`."""
    error: str
    committed: int
    """Tokens in the request's log when it failed."""
    model: str
    """Key of the model."""
    numerics: str
    body: bytes
    """The encoded RequestBody."""
    fields: Mapping[bytes, bytes]
    """The whole entry."""
    tokens: tuple[int, ...]
    """Its committed tokens; of more than 1024, the first ones."""

    @property
    def ran(self) -> list[Ran]:
        """Which workers computed which of its tokens. Raises WireError if that cannot be decoded."""
        return provenance(self.fields, self.committed)

    @property
    def when(self) -> datetime:
        return datetime.fromtimestamp(int(self.entry.partition("-")[0]) / 1000).astimezone()

    def summary(self) -> dict[str, Any]:
        """Returns the letter as JSON fields, without the prompt, which is private to its sender.

        For a `body` that cannot be decoded, `prompt_tokens` is None, `unreadable` has the cause, and `params` and
        `tensor_step` are absent.
        """
        facts: dict[str, Any] = {
            "id": self.request_id,
            "when": self.when.isoformat(timespec="seconds"),
            "why": self.why,
            "error": self.error,
            "committed": self.committed,
            "model": self.model,
            "numerics_id": self.numerics,
        }
        try:
            body = RequestBody.decode(self.body)
        except WireError as error:
            return facts | {"prompt_tokens": None, "unreadable": str(error)}
        return facts | {
            "prompt_tokens": int(body.prompt.size),
            "params": body.params,
            "tensor_step": body.logits != "none",
        }


def read_letters(client: redis.Redis, keys: Keys) -> list[DeadLetter]:
    """Returns all dead letters of a cell, the oldest first. Raises RedisTrouble if Redis does not answer."""

    def text(fields: dict[bytes, bytes], name: bytes) -> str:
        return fields.get(name, b"").decode("utf-8", "replace")

    return [
        DeadLetter(
            entry=entry.decode(),
            request_id=text(fields, b"request"),
            why=text(fields, b"reason"),
            error=text(fields, b"error"),
            committed=int(fields[b"committed"]),
            model=text(fields, b"model"),
            numerics=text(fields, b"numerics"),
            body=fields[b"body"],
            fields=fields,
            tokens=tuple(codec.unpack_list(fields[b"tokens"])) if b"tokens" in fields else (),
        )
        for entry, fields in cast(Any, client.xrange(keys.dead_letters))
    ]


def _find(cell: CellAddress, request_id: str) -> DeadLetter:
    """Returns the newest dead letter of a request id. Raises UsageError if there is none."""
    with connected(cell) as client:
        letters = [one for one in read_letters(client, cell.keys) if one.request_id == own_id(request_id)]
    if not letters:
        raise UsageError(f"there is no dead letter of {request_id} (see: {typed('dead-letters list')})")
    return letters[-1]


@app.command("list")
@with_option_groups
def show_all(
    named: CellOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array instead of a table.")] = False,
) -> None:
    """Show all dead letters, the oldest first."""
    cell = named.find()
    with connected(cell) as client:
        letters = read_letters(client, cell.keys)
    if as_json:
        typer.echo(json.dumps([one.summary() for one in letters], indent=1))
    elif not letters:
        typer.echo("no dead letters")
    else:
        table = Table(Column("id", no_wrap=True), "when", "why", "prompt", "committed")
        for one in letters:
            facts = one.summary()
            when = one.when.strftime("%Y-%m-%d %H:%M:%S")
            table.add_row(one.request_id, when, one.why, f"{facts['prompt_tokens'] or '?'} tokens", str(one.committed))
        Console(soft_wrap=True).print(table)


@app.command("show")
@with_option_groups
def show_one(
    request: Letter,
    named: CellOptions,
    prompt: Annotated[bool, typer.Option("--prompt", help="Show its prompt too, as token ids.")] = False,
) -> None:
    """Show one dead letter with all its facts, as JSON."""
    letter = _find(named.find(), request)
    facts = letter.summary() | {"runs": [asdict(run) for run in letter.ran]}
    if prompt:
        facts["prompt"] = RequestBody.decode(letter.body).prompt.tolist()
    typer.echo(json.dumps(facts, indent=1))


@app.command("replay")
@with_option_groups
def replay(
    request: Letter,
    named: CellOptions,
    model: Annotated[Path | None, typer.Option(help="Block folder of its model; default: BLOCKRELAY_MODEL.")] = None,
) -> None:
    """Run the request alone in a new process, without services, and print the outcome and what differs from its runs.

    Exit code 1: it fails again.
    """
    cell = named.find()
    folder = (model or cell.settings.model).absolute()
    model_key = open_block_folder(folder, blocks=[]).model_key
    letter = _find(cell, request)
    if model_key != letter.model:
        raise UsageError(f"{letter.request_id} was for another model than {folder}: choose it with --model")
    typer.echo(f"{letter.request_id}: {letter.why}, {letter.committed} tokens were committed, by")
    for run in letter.ran:
        typer.echo(f"  attempt {run.attempt}, tokens {run.begin} to {run.end}: {_route(run)}")
    typer.echo("Now alone:")
    sys.stdout.flush()
    committed = ",".join(map(str, letter.tokens))
    named_request = ("--request", letter.request_id, "--committed", committed)
    argv = module_command("blockrelay_worker.offline.replay", "--model", folder, *named_request)
    code = subprocess.run(argv, input=letter.body, check=False).returncode
    if code < 0:
        typer.echo(f"\nthe process was killed by signal {-code}: it kills its worker")
    elif code:
        typer.echo(f"\nthe process ended with code {code}")
    else:
        typer.echo("nothing failed here")
    raise typer.Exit(1 if code else 0)


def _route(run: Ran) -> str:
    return ", ".join(f"{stage.device} {stage.worker} (blocks {stage.blocks}, {stage.numerics})" for stage in run.stages)


@app.command("remove")
@with_option_groups
def remove(
    named: CellOptions,
    request: Annotated[str | None, typer.Argument(metavar="ID", help="Id of the request.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all dead letters.")] = False,
) -> None:
    """Remove one dead letter, or all."""
    if (request is None) != everything:
        raise UsageError("give an ID or --all")
    cell = named.find()
    entries = [] if request is None else [_find(cell, request).entry]
    with connected(cell) as client:
        if request is None:
            entries = [one.entry for one in read_letters(client, cell.keys)]
        if entries:
            client.xdel(cell.keys.dead_letters, *entries)
    typer.echo(f"{len(entries)} removed")
