"""The process behind `blockrelay plan`: `python -m blockrelay_scheduler.plan_command`."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from blockrelay.command_app import run_app
from blockrelay.errors import UsageError
from blockrelay.planning.devices import parse_described
from blockrelay.quantities import parse_quantity
from blockrelay_scheduler.plan_command import in_force
from blockrelay_scheduler.plan_command.inputs import PlanOptions, read_problem
from blockrelay_scheduler.plan_command.onnx_folder import planned_model
from blockrelay_scheduler.plan_command.tables import show, show_beside
from blockrelay_scheduler.planning.problem import Objective, Problem, Wishes
from blockrelay_scheduler.planning.report import PlanReport, report
from blockrelay_scheduler.planning.strategies.registry import names, place
from blockrelay_scheduler.policy import DEFAULT_REQUESTS

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command("apply")(in_force.apply)
app.command("history")(in_force.history)
app.command("rollback")(in_force.rollback)

Model = Annotated[Path | None, typer.Option("--model", help="Block folder to plan for [default: the bundled model].")]
Blocks = Annotated[
    Path | None,
    typer.Option("--blocks", metavar="FOLDER", help="Plan for ONNX blocks that you own, as they are, not for --model."),
]
MaxPosition = Annotated[
    int | None,
    typer.Option("--max-position", min=1, metavar="N", help="With --blocks: length of the context in tokens."),
]
ProfileFile = Annotated[
    Path | None, typer.Option("--profile", metavar="FILE", help="Measured times that `blockrelay profile` wrote.")
]
DevicesFile = Annotated[
    Path | None,
    typer.Option("--devices", metavar="FILE", help="Devices and the links between hosts [default: this machine]."),
]
StrategyName = Annotated[str, typer.Option("--strategy", help=f"{', '.join(names())}")]
Aim = Annotated[
    Objective,
    typer.Option("--objective", help="For strategy auto: speed of one request, or of many requests together."),
]
Context = Annotated[
    str | None,
    typer.Option(
        "--context",
        metavar="N",
        help="Tokens of each request that KV pages must have room for, such as 32k "
        "[default: 2048, or the model's context if that is shorter].",
    ),
]
Requests = Annotated[int, typer.Option("--requests", min=1, help="Requests at once that KV pages must have room for.")]
InPrecision = Annotated[
    str | None,
    typer.Option("--precision", help="Plan as if the model had been converted to this precision (see: convert)."),
]
Parts = Annotated[
    int | None, typer.Option("--parts", min=1, help="Number of stages [default: one for each target or device].")
]
Boundaries = Annotated[
    str | None, typer.Option("--boundaries", metavar="A-B,C-D", help="For strategy custom: the blocks of each stage.")
]
Targets = Annotated[
    str | None,
    typer.Option(
        "--targets",
        metavar="ID,ID",
        help="Devices of the stages in their order, then a CPU; strategy auto chooses from them.",
    ),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option("--memory-limit", metavar="BYTES", help="Most bytes of one stage, such as 8GB [default: no limit]."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@app.callback(invoke_without_command=True)
def plan(
    command: typer.Context,
    model: Model = None,
    blocks: Blocks = None,
    max_position: MaxPosition = None,
    profile: ProfileFile = None,
    devices: DevicesFile = None,
    strategy: StrategyName = "auto",
    objective: Aim = "throughput",
    context: Context = None,
    requests: Requests = DEFAULT_REQUESTS,
    precision: InPrecision = None,
    parts: Parts = None,
    boundaries: Boundaries = None,
    targets: Targets = None,
    memory_limit: MemoryLimit = None,
    as_json: AsJson = False,
) -> None:
    """Choose which device runs which blocks, and explain it: stages, memory, predicted speed, a sentence per choice."""
    if command.invoked_subcommand is not None:
        return
    options = PlanOptions(
        model=planned_model(model, blocks, max_position),
        profile=profile, devices=devices, objective=objective, context=_tokens(context),
        requests=requests, precision=precision,
        wishes=_wishes(parts, boundaries, targets, memory_limit),
    )  # fmt: skip
    explained = _report(strategy, read_problem(options))
    typer.echo(json.dumps(explained.to_json(), indent=1)) if as_json else show(explained)


@app.command("what-if")
def what_if(
    model: Model = None,
    blocks: Blocks = None,
    max_position: MaxPosition = None,
    profile: ProfileFile = None,
    devices: DevicesFile = None,
    strategy: StrategyName = "auto",
    objective: Aim = "throughput",
    requests: Requests = DEFAULT_REQUESTS,
    context: Context = None,
    precision: InPrecision = None,
    add: Annotated[
        list[str] | None,
        typer.Option(metavar="DEVICE", help="Add a device, such as gpu:24GB:900GB/s or gpu:24GB:900GB/s:80T/s."),
    ] = None,
    remove: Annotated[list[str] | None, typer.Option(metavar="HOST", help="Remove the devices of this host.")] = None,
    parts: Parts = None,
    boundaries: Boundaries = None,
    targets: Targets = None,
    memory_limit: MemoryLimit = None,
    as_json: AsJson = False,
) -> None:
    """Show the plan of today beside that of other devices, another context or precision.

    --add, --remove, --context and --precision change the second plan alone; all else is the same for both.
    """
    options = PlanOptions(
        model=planned_model(model, blocks, max_position),
        profile=profile, devices=devices, objective=objective, requests=requests,
        wishes=_wishes(parts, boundaries, targets, memory_limit),
    )  # fmt: skip
    today = read_problem(options)
    fleet = today.fleet
    for text in add or []:
        fleet = fleet.with_device(parse_described(text, fleet.devices))
    for host in remove or []:
        fleet = fleet.without_host(host)
    changed = read_problem(replace(options, context=_tokens(context), precision=precision))
    reports: dict[str, PlanReport] = {}
    for title, problem in (("today", today), ("then", replace(changed, fleet=fleet))):
        try:
            reports[title] = _report(strategy, problem)
        except UsageError as error:
            raise type(error)(f"the plan of {title}: {error}") from None
    if as_json:
        typer.echo(json.dumps({title: explained.to_json() for title, explained in reports.items()}, indent=1))
    else:
        show_beside(reports)


def _report(strategy: str, problem: Problem) -> PlanReport:
    return report(strategy, problem, place(strategy, problem))


def _tokens(text: str | None) -> int | None:
    """Parses a number of tokens, `2048` or `32k`, where k is 1024. Raises UsageError for anything else."""
    if text is None:
        return None
    number = text.lower().removesuffix("k")
    if not number.isascii() or not number.isdecimal() or not 0 < int(number) < 1 << 24:
        raise UsageError(f"--context takes a number of tokens such as 2048 or 32k, not {text!r}")
    return int(number) * (1024 if number != text else 1)


def _wishes(parts: int | None, boundaries: str | None, targets: str | None, limit: str | None) -> Wishes:
    """Parses the options that restrict a strategy. Raises UsageError for text that cannot be parsed."""
    return Wishes(
        parts=parts,
        boundaries=None if boundaries is None else tuple(map(_boundary, boundaries.split(","))),
        targets=None if targets is None else tuple(targets.split(",")),
        memory_limit=None if limit is None else int(parse_quantity(limit, "B", where="--memory-limit")),
    )


def _boundary(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    digits = (first, last) if dash else (first,)
    if not text.isascii() or not all(map(str.isdecimal, digits)) or len(text) > 20:
        raise UsageError(f"--boundaries takes blocks such as 1-3,4-9, not {text!r}")
    return int(first), int(last or first)


def run(arguments: list[str] | None = None) -> int:
    """Runs the command with `arguments` (None: those of the process) and returns its exit code.

    It is 0, 2 for input that the user must change, 130 after Ctrl-C, or 1 for any other failure. An error is one line
    on stderr.
    """
    return run_app(app, arguments, name="blockrelay plan")


if __name__ == "__main__":
    sys.exit(run())
