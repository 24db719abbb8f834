"""Reads the settings of a service from its environment and its options."""

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import SettingsError

from blockrelay.errors import UsageError
from blockrelay.settings.common import Settings
from blockrelay.settings.gateway import GatewaySettings
from blockrelay.settings.scheduler import SchedulerSettings
from blockrelay.settings.worker import WorkerSettings

S = TypeVar("S", bound=Settings)
_PREFIX = "BLOCKRELAY_"
#: Variables that no service reads: compose.yaml does.
_OTHERS = ("BLOCKRELAY_WORKERS",)
_KNOWN = frozenset(
    f"{_PREFIX}{field.upper()}"
    for kind in (Settings, GatewaySettings, SchedulerSettings, WorkerSettings)
    for field in kind.model_fields
).union(_OTHERS)
#: Variables that Kubernetes sets in each pod for a Service called blockrelay or blockrelay-...: not settings.
_OF_KUBERNETES = re.compile(
    r"BLOCKRELAY_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_LINK = re.compile(r"(tcp|udp|sctp)://")


def check_names(environment: Mapping[str, str], *, strict: bool = False, links: bool = False) -> None:
    """Raises UsageError, one line, for a variable BLOCKRELAY_... that is no setting.

    `strict`: also for other names. `links`: settings may have the values that Kubernetes sets for a Service
    (`is_link`), which are an error otherwise. Its variables that are no settings are ignored.
    """
    for variable, value in sorted(environment.items()):
        name = variable.upper()  # settings are read without regard to case, too
        ours = strict or name.startswith(_PREFIX)
        if name in _KNOWN and not links and is_link(name, value):
            service = name.lower().removesuffix("_port").replace("_", "-")
            raise UsageError(
                f"{variable} is {value}: Kubernetes tells a pod so of a Service called {service}; the pod needs "
                "`enableServiceLinks: false`, or the Service another name"
            )
        if not ours or name in _KNOWN or _OF_KUBERNETES.fullmatch(name):
            continue
        if is_link(name, value):
            continue
        nearest = difflib.get_close_matches(name, sorted(_KNOWN), n=1, cutoff=0.0)
        raise UsageError(f"{variable} is not a setting; the nearest name is {nearest[0]}")


def is_link(name: str, value: str) -> bool:
    """Returns whether Kubernetes set this variable for a Service: a name in ..._PORT, and a URL such as tcp://..."""
    return name.upper().endswith("_PORT") and _LINK.match(value) is not None


def read_settings(kind: type[S], arguments: Sequence[str], *, program: str) -> S:
    """Reads settings from options (`arguments`) and environment. Raises UsageError, one line naming the setting."""
    check_names(os.environ, links=any(one == "--port" or one.startswith("--port=") for one in arguments))
    how: dict[str, Any] = {
        "_cli_parse_args": list(arguments),
        "_cli_prog_name": program,
        "_cli_kebab_case": True,
        "_cli_exit_on_error": False,
        "_cli_avoid_json": True,
    }
    try:
        return kind(**how)
    except ValidationError as error:
        raise UsageError(problems_of(error)) from None
    except SettingsError as error:
        raise UsageError(str(error)) from None


def problems_of(error: ValidationError) -> str:
    """Returns the wrong settings and what is wrong with each, in one line."""
    return "; ".join(f"{_PREFIX}{'_'.join(map(str, one['loc'])).upper()}: {one['msg']}" for one in error.errors())


def environment_for(**fields: object) -> dict[str, str]:
    """Returns this process's environment with these settings, for starting a service; None takes a variable out."""
    names = {f"BLOCKRELAY_{name.upper()}": value for name, value in fields.items()}
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return kept | {name: str(value) for name, value in names.items() if value is not None}
