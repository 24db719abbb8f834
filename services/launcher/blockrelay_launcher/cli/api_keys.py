"""The command `blockrelay keys`: makes, lists and removes API keys in the file that gateways read."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from blockrelay.auth.api_keys import USUAL_PRIORITY, Tenant, add_key, read_keys, remove_key
from blockrelay.errors import UsageError
from blockrelay.settings import GatewaySettings

app = typer.Typer(
    name="keys", no_args_is_help=True, help="Make, list and remove API keys. Running gateways read the changed file."
)

File = Annotated[
    Path | None,
    typer.Option("--file", "--api-keys", metavar="PATH", help="File of the API keys; default: BLOCKRELAY_API_KEYS."),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the tenant that owns the key: a-z 0-9 _ -")]


def _file(given: Path | None) -> Path:
    """Returns the file of API keys: the option, else the setting. Raises UsageError if there is neither."""
    path = given or GatewaySettings().api_keys
    if path is None:
        raise UsageError("which file? give --file PATH or set BLOCKRELAY_API_KEYS")
    return path


@app.command("add")
def add(
    name: Name,
    file: File = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(metavar="N", help="Most tokens per minute (prompt and max_tokens); default: no limit.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(metavar="N", help="Most unfinished requests at once; default: no limit.")
    ] = None,
    weight: Annotated[
        float, typer.Option(metavar="W", help="Weight of its share of the workers while several tenants wait.")
    ] = 1.0,
    priority: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Lowest number that its requests may have as priority; below 0 they go before those of other keys.",
        ),
    ] = USUAL_PRIORITY,
    operator: Annotated[
        bool, typer.Option("--operator", help="Let the key see the ids of all requests in status events.")
    ] = False,
) -> None:
    """Make a key and print it. It is shown only this once: the file holds its hash."""
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
    """Show the names and limits of all keys. The keys themselves are not stored."""
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
    """Remove a key. Gateways refuse it from now on, on open connections too; accepted requests run to their end."""
    remove_key(_file(file), name)
    typer.echo(f"the key of {name} is removed")


def _plain(limit: int | None) -> str:
    return "-" if limit is None else str(limit)
