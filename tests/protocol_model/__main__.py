"""Explore every configuration, print a table; exit status 1 with a trace when one does not hold.

`python -m tests.protocol_model NAME ...` takes some of them, `--quick` the small bounds only.
"""

import argparse
import dataclasses
import multiprocessing
import os
import sys
import time

from tests.protocol_model.bounds import Bounds, Rules
from tests.protocol_model.configurations import CONFIGURATIONS, Configuration, parts
from tests.protocol_model.data import State
from tests.protocol_model.explorer import Found, TooLarge, explore
from tests.protocol_model.protocol import Protocol


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.protocol_model", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(c.name for c in CONFIGURATIONS))
    parser.add_argument("--quick", action="store_true", help="small bounds only")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    if unknown := set(asked.names) - {c.name for c in CONFIGURATIONS}:
        parser.error(f"no such configuration: {', '.join(sorted(unknown))}")
    chosen = [(c, b) for c, b in parts(full=not asked.quick) if not asked.names or c.name in asked.names]
    started, failed = time.monotonic(), 0
    print(f"{'configuration':14}{'states':>9}{'steps':>10}{'seconds':>9}  result      bounds and faults")
    with multiprocessing.Pool(asked.processes) as pool:
        for (configuration, bounds), found in zip(chosen, pool.imap(_explore, (b for _, b in chosen)), strict=True):
            failed += _report(configuration, bounds, found)
    print(f"{len(chosen)} explored in {time.monotonic() - started:.0f} s, {failed} with a fault")
    return 1 if failed else 0


def _explore(bounds: Bounds) -> Found[State] | str:
    try:
        return explore(Protocol(bounds))
    except TooLarge as error:
        return str(error)


def _report(configuration: Configuration, bounds: Bounds, found: Found[State] | str) -> bool:
    """One line, and the trace of a fault. True when there is one."""
    if isinstance(found, str):
        print(f"{configuration.name:14}{found}: {describe(bounds)}", flush=True)
        return True
    result = found.counterexample.kind if found.counterexample else "holds"
    sizes = f"{found.states:9,}{found.transitions:10,}{found.seconds:9.1f}"
    print(f"{configuration.name:14}{sizes}  {result:12}{describe(bounds)}", flush=True)
    if found.counterexample:
        print(f"\n{found.counterexample}\n", flush=True)
    return found.counterexample is not None


def describe(bounds: Bounds) -> str:
    """What differs from the plainest configuration, faults last."""
    said = [f"{bounds.stages} x {bounds.workers} workers", f"{bounds.requests} requests"]
    plain = Bounds()
    for field in dataclasses.fields(bounds):
        value = getattr(bounds, field.name)
        if field.name in ("stages", "workers", "requests", "faults", "rules") or value == getattr(plain, field.name):
            continue
        said.append(f"{field.name}={set(value) or '{}' if isinstance(value, frozenset) else value}")
    off = [rule.name for rule in dataclasses.fields(Rules) if not getattr(bounds.rules, rule.name)]
    faults = [f"{count} {fault}" for fault, count in bounds.faults._asdict().items() if count]
    return ", ".join(said) + "; " + (", ".join(faults) or "no fault") + "".join(f"; without {rule}" for rule in off)


if __name__ == "__main__":
    sys.exit(main())
