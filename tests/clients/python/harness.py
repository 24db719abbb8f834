"""Runs the cases of a client in the environment where it is installed, where nothing of ours is.

A client's module has a function for each case of its part of `cases.toml`, which comes on stdin as JSON. The last line
of stdout says what became of each: `works`; how the gateway refused it (`400 tools`, `404`); or what went wrong.
"""

import json
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class Target:
    """Where the gateway is. `sends`: the fields of a case that is nothing else."""

    url: str
    model: str
    tokenizer: str
    sends: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def base(self) -> str:
        """What clients call the base URL."""
        return f"{self.url}/v1"


Case = Callable[[Target], None]
_CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """The case of this name, with - for _. It works if nothing is raised."""
    _CASES[function.__name__.replace("_", "-")] = function
    return function


def run(*, sends: Case | None = None) -> None:
    """`sends` runs the cases that have fields and no function of their own."""
    url, model, tokenizer = sys.argv[1:4]
    table: dict[str, dict[str, Any]] = json.load(sys.stdin)
    found: dict[str, str] = {}
    for name, row in table.items():
        one = _CASES.get(name, sends if "sends" in row else None)
        target = Target(url, model, tokenizer, row.get("sends", {}))
        found[name] = "has no function" if one is None else _outcome(one, target)
    found |= dict.fromkeys(_CASES.keys() - table.keys(), "is not in the table")
    sys.stdout.write(f"{json.dumps(found)}\n")


def _outcome(one: Case, target: Target) -> str:
    try:
        one(target)
    except Exception as error:  # noqa: BLE001  # whatever a client raises is what is asked for
        told = refusal(error)
        if told is None:
            traceback.print_exc()
        return told or f"{type(error).__name__}: {error}"[:300]
    return "works"


def refusal(error: BaseException) -> str | None:
    """Status, and the field that the gateway named, of the answer behind an exception; None where there was none."""
    for one in _chain(error):
        response = getattr(one, "response", None)
        for status in (getattr(one, "status_code", None), getattr(response, "status_code", None)):
            if isinstance(status, int) and status >= 400:
                return f"{status} {_param(one)}".rstrip()
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _param(error: BaseException) -> str:
    param = getattr(error, "param", None)
    body = getattr(error, "body", None)
    if isinstance(body, dict):
        fields = cast(dict[str, Any], body)
        param = param or fields.get("param") or cast(dict[str, Any], fields.get("error") or {}).get("param")
    found = re.search(r"([a-z_.0-9]+) is not supported", str(error))
    return str(param or (found[1] if found else "") or "")
