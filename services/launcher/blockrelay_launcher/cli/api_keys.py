"""`blockrelay keys`: makes, lists and removes API keys in the file that gateways read."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from blockrelay.auth.api_keys import USUAL_PRIORITY, Tenant, add_key, read_keys, remove_key
from blockrelay.errors import UsageError
from blockrelay.settings import GatewaySettings

app = typer.Typer(
    name="keys", no_args_is_help=True, help="API keys: make, list, remove. Gateways that run read the changed file."
)

File = Annotated[
    Path | None,
    typer.Option("--file", "--api-keys", metavar="PATH", help="The file of keys; default: BLOCKRELAY_API_KEYS."),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is: a-z 0-9 _ -")]


def _file(given: Path | None) -> Path:
    path = given or GatewaySettings().api_keys
    if path is None:
        raise UsageError("which file? give --file PATH or set BLOCKRELAY_API_KEYS")
    return path


@app.command("add")
def add(
    name: Name,
    file: File = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(metavar="N", help="Prompt and max_tokens accepted per minute; default: no limit.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(metavar="N", help="Accepted and unfinished requests; default: no limit.")
    ] = None,
    weight: Annotated[float, typer.Option(metavar="W", help="Share of the workers while others wait too.")] = 1.0,
    priority: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="The earliest (lowest) priority its requests may have; below 0 they overtake those of other keys.",
        ),
    ] = USUAL_PRIORITY,
    operator: Annotated[
        bool, typer.Option("--operator", help="Sees the ids of all requests in status events.")
    ] = False,
) -> None:
    """Make a key and print it, once: only its hash is stored."""
    tenant = Tenant(
        name=name,
        tokens_per_minute=tokens_per_minute,
        concurrency=concurrency,
        weight=weight,
        priority=priority,
        operator=operator,
    )
    typer.echo(add_key(_file(file), tenant))


@app.command("list")
def show(file: File = None) -> None:
    """Names and limits. Nobody can see a key again."""
    table = Table("name", "tokens per minute", "concurrency", "weight", "priority from", "operator")
    for key in read_keys(_file(file)):
        t = key.tenant
        table.add_row(
            t.name,
            _plain(t.tokens_per_minute),
            _plain(t.concurrency),
            f"{t.weight:g}",
            str(t.priority),
            "yes" if t.operator else "-",
        )
    Console().print(table)


@app.command("remove")
def remove(name: Name, file: File = None) -> None:
    """Its key is refused from now on, on open sockets and streams too; what was accepted goes on."""
    remove_key(_file(file), name)
    typer.echo(f"the key of {name} is removed")


def _plain(limit: int | None) -> str:
    return "-" if limit is None else str(limit)
