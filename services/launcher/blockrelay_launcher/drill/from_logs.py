"""What the logs of a drilled system tell: runs, processes that ended without having been told to, refusals by Redis."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from blockrelay.exit_codes import BROKEN
from blockrelay_launcher.drill.faults import Fault

_ENDED = re.compile(r"(\S+) (?:was killed by signal (\d+)|ended with code (\d+)); starting it again")
#: No right; keys of several slots in one command; in a script.
_REFUSALS = ("NOPERM", "CROSSSLOT", "non local key")
_HUNG = re.compile(r"(\S+) did not end by itself and was killed")


def run_starts(logs: Path) -> Iterable[Mapping[str, Any]]:
    """The data of every RUN_START line of the workers' logs, oldest first."""
    found: list[tuple[str, dict[str, Any]]] = []
    for path in logs.glob("*worker*.log*"):
        with path.open(errors="replace") as lines:
            for line in lines:
                if "RUN_START" not in line:
                    continue
                try:
                    event = json.loads(line)
                    found.append((event["timestamp"], {"request_id": event["request_id"], **event["data"]}))
                except (ValueError, KeyError):
                    continue  # cut off by a kill
    return [data for _, data in sorted(found, key=lambda pair: pair[0])]


def own_ends(said: str, faults: Sequence[Fault]) -> list[str]:
    """Lines of `up` about processes that ended and that nobody had killed (by name, once per fault) or drained, and
    about those that did not end when they were told to. A worker whose device is lost before it serves may end too."""
    killed = Counter(fault.target for fault in faults if fault.kind == "kill")
    drained = Counter(fault.target for fault in faults if fault.kind == "drain")
    found: list[str] = []
    for line in said.splitlines():
        if _HUNG.fullmatch(line):
            found.append(line)
        if ended := _ENDED.fullmatch(line):
            name, by_signal, code = ended.groups()
            told = code == "0" or by_signal == "15"  # a drain that came before the process could be told
            expected = killed if by_signal == "9" else drained if told else Counter[str]()
            if code == str(BROKEN) and "worker" in name and killed["device"] > 0:
                killed["device"] -= 1
                continue
            target = "worker" if "worker" in name else re.sub(r"-\d+$", "", name)
            if expected[target] > 0:
                expected[target] -= 1
            else:
                found.append(line)
    return found


def refusals(logs: Path) -> list[str]:
    """How often Redis refused what is never right, by log file: a command to the user of a service, or one whose keys
    are in several slots of a cluster."""
    found: list[str] = []
    for path in sorted(logs.glob("*.log*")):
        text = path.read_text(errors="replace")
        found += [f"{path.name}: {said} {count} times" for said in _REFUSALS if (count := text.count(said))]
    return found
