"""Reads the logs of a drilled system: runs, processes that ended by themselves, commands that Redis refused."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from blockrelay.exit_codes import BROKEN
from blockrelay_launcher.drill.faults import Fault

_ENDED = re.compile(r"(\S+) (?:was killed by signal (\d+)|ended with code (\d+)); starting it again")
#: Errors of Redis for: no permission; keys of several slots in one command; the same in a script.
_REFUSALS = ("NOPERM", "CROSSSLOT", "non local key")
_HUNG = re.compile(r"(\S+) did not end by itself and was killed")
_WITHOUT_RANKS = re.compile(r"(\S+): .* times in a row while a stage was loaded")


def run_starts(logs: Path) -> Iterable[Mapping[str, Any]]:
    """Returns the data of every RUN_START line in the workers' logs, with its `request_id`, the oldest first.

    `logs` is the folder of the log files.
    """
    starts: list[tuple[str, dict[str, Any]]] = []
    for path in logs.glob("*worker*.log*"):
        with path.open(errors="replace") as lines:
            for line in lines:
                if "RUN_START" not in line:
                    continue
                try:
                    event = json.loads(line)
                    starts.append((event["timestamp"], {"request_id": event["request_id"], **event["data"]}))
                except (ValueError, KeyError):
                    continue  # cut off by a kill
    return [data for _, data in sorted(starts, key=lambda pair: pair[0])]


def own_ends(log: str, faults: Sequence[Fault]) -> list[str]:
    """Returns the lines in the log of `up` about processes that ended without a fault, or hung when they had to end.

    Each fault (kill or drain) explains one end of a process of its role. A worker may also end because its device was
    lost before it served, or because it says that ranks died in several loads in a row.
    """
    killed = Counter(fault.target for fault in faults if fault.kind == "kill")
    drained = Counter(fault.target for fault in faults if fault.kind == "drain")
    without_ranks: Counter[str] = Counter()
    lines: list[str] = []
    for line in log.splitlines():
        if (said := _WITHOUT_RANKS.fullmatch(line)) and any(fault.kind == "rank" for fault in faults):
            without_ranks[said[1]] += 1
        if _HUNG.fullmatch(line):
            lines.append(line)
        if ended := _ENDED.fullmatch(line):
            name, by_signal, code = ended.groups()
            drains = code == "0" or by_signal == "15"  # signal 15: the drain came before the process had a handler
            expected = killed if by_signal == "9" else drained if drains else Counter[str]()
            if code == str(BROKEN) and without_ranks[name] > 0:
                without_ranks[name] -= 1
                continue
            if code == str(BROKEN) and "worker" in name and killed["device"] > 0:
                killed["device"] -= 1
                continue
            target = "worker" if "worker" in name else re.sub(r"-\d+$", "", name)
            if expected[target] > 0:
                expected[target] -= 1
            else:
                lines.append(line)
    return lines


def refusals(logs: Path) -> list[str]:
    """Returns a line for each log file in the folder `logs` with refusals by Redis that must never occur.

    These are commands that a service's Redis user may not call, and commands whose keys are in several slots.
    """
    counts: list[str] = []
    for path in sorted(logs.glob("*.log*")):
        text = path.read_text(errors="replace")
        counts += [f"{path.name}: {error} {count} times" for error in _REFUSALS if (count := text.count(error))]
    return counts
