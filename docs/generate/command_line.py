"""docs/command-line.md, from the commands themselves."""

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from typer.main import get_command

from blockrelay.settings import BUNDLED_MODEL
from blockrelay_converter import __main__ as convert
from blockrelay_converter import analyse
from blockrelay_launcher.cli.main import app
from blockrelay_scheduler.plan_command import __main__ as plan_command
from blockrelay_scheduler.plan_command import precision
from blockrelay_worker.offline import devices, evaluate, generate, gpu_report
from docs.generate.tables import table

_HEAD = """\
# Command line

For everyone who types a command and wants its options.

`blockrelay COMMAND --help` shows the same; in a checkout `. .venv/bin/activate` puts the command on the path. Every
error is one line on stderr that begins with `blockrelay: `. Exit codes: 0 done, 1 something failed, 2 the command was
asked for something impossible; `dead-letters replay` ends with 1 when the request fails again, `drill` when an answer
was lost or differed. [Operations](operations.md) says when to use which.
"""
#: Commands that become another process, with that one's options.
_OTHER_SERVICES: dict[str, typer.Typer] = {
    "convert": convert.app,
    "generate": generate.app,
    "evaluate": evaluate.app,
    "analyse": analyse.app,
    "devices": devices.app,
    "gpu-report": gpu_report.app,
    "plan": plan_command.app,
    "precision": precision.app,
}
#: What stands for a value where the option does not say.
_WORDS = {str: "TEXT", int: "N", float: "X", Path: "PATH"}


def page() -> str:
    """The whole page."""
    root = get_command(app)
    return _HEAD + _part("blockrelay", root) + "".join(_part(*each) for each in _commands("blockrelay", root))


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its full name."""
    last = name.rsplit(" ", 1)[-1]
    if last in _OTHER_SERVICES:
        command = get_command(_OTHER_SERVICES[last])
    inner: dict[str, Any] = getattr(command, "commands", {})
    if not inner or getattr(command, "invoke_without_command", False):
        yield name, command
    for word, one in inner.items():
        yield from _commands(f"{name} {word}", one)


def _part(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    usage = " ".join([name, *(_argument(p) for p in arguments)])
    text = f"\n## `{usage}`\n\n{(command.help or '').strip()}\n"
    rows = [(_argument(p), "required" if p.required else "", p.help or "") for p in arguments]
    groups = {"": rows}
    for p in options:
        row = (f"`{'`, `'.join([*p.opts, *p.secondary_opts])}`{_values(p)}", _default(p), p.help or "")
        groups.setdefault(p.rich_help_panel or "", []).append(row)
    for title, rows in groups.items():
        head = f"\n**{title}**\n" if title else ""
        text += f"{head}\n{table(('option', 'default', 'meaning'), rows)}" if rows else ""
    return text


def _argument(param: Any) -> str:
    return (param.metavar or param.name).upper()


def _values(param: Any) -> str:
    kind = param.type_descriptor.annotation
    if param.is_flag:
        return ""
    if get_origin(kind) is Literal:
        return f" {'|'.join(get_args(kind))}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f" {'|'.join(str(member.value) for member in kind)}"
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
    return f" {param.metavar or _WORDS[kind]}"


def _default(param: Any) -> str:
    default = param.default
    if param.required:
        return "required"
    if default is None or default is False or callable(default) or default == []:
        return "" if default is not False or not param.secondary_opts else f"`{param.secondary_opts[0]}`"
    if default is True:
        return f"`{param.opts[0]}`"
    return "the bundled model" if default == BUNDLED_MODEL else f"`{getattr(default, 'value', default)}`"
