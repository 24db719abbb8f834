"""Tests a GPU: `build/gpu-kit/run [REPORT.json]`, or `python -m bench.gpu_kit --small` with installed packages.

It takes at most eight minutes and no network: devices, known answers, the executor suites, a mixed route whose device
is killed, tokens per second beside PyTorch, and times of steps and hand-overs. Each part has a time limit. The report
is written again after each part, so that it has all results so far however the script ends. Exit code 1 if a part
failed.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.gpu_kit.contents import have
from bench.gpu_kit.machine import ROOT, described, find_devices, prepare, unusable
from bench.gpu_kit.parts import ALL_S, Need, limit_of, parts, run
from bench.gpu_kit.report import Report, Result, exit_code

#: Seconds of remaining time below which no part is begun.
_LEAST_S = 5.0


def main() -> int:
    """Runs the parts, writes the report, and returns the exit code: 2 for a machine that cannot be prepared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, nargs="?", default=Path("gpu-proof.json"), help="file for the report")
    parser.add_argument("--kit", type=Path, help="folder of `make gpu-kit`; default: packages installed here")
    parser.add_argument("--small", action="store_true", help="small shapes, no limit of eight minutes")
    parser.add_argument("--only", default="", help="parts to run, separated by commas; default: all")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an exception, so that the running part ends too
    began = time.monotonic()
    version = (ROOT / "shared/blockrelay/__init__.py").read_text().split('__version__ = "')[1].split('"')[0]
    report = Report(path=options.report.absolute(), blockrelay=version, small=options.small)
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as folder:
        work = Path(folder)
        if options.kit is not None:
            if problem := unusable():
                print(problem, file=sys.stderr)
                return 2
            report.machine["prepared"] = prepare(options.kit.absolute(), work, environment)
        report.machine |= described(environment)
        report.machine["devices"] = find_devices(environment)
        report.seconds = time.monotonic() - began
        report.write()
        print(f"{report.seconds:6.1f} s  {_shown(report.machine)}", flush=True)
        _run_all(report, options.small, options.only, environment, work, began)
    print(f"the report is in {options.report}")
    return exit_code(report.results)


def _run_all(report: Report, small: bool, only: str, environment: dict[str, str], work: Path, began: float) -> None:
    """Runs the parts one after the other, and writes the report after each."""
    webgpu = _usable(report.machine["devices"])
    met: dict[Need, bool] = {
        "device": any(one["kind"] != "cpu" and not one["problem"] for one in report.machine["devices"]),
        "webgpu": webgpu is not None,
        "cuda": any(one["id"].startswith("cuda:") for one in report.machine["devices"]),
        "torch": have("torch") is not None,
    }
    float16 = webgpu is not None and "f16" in webgpu["features"]
    for part in parts(small=small, float16=float16, work=work):
        if only and part.name not in only.split(","):
            continue
        limit_s = limit_of(part, small=small, left_s=ALL_S - (time.monotonic() - began))
        if lacks := part.lacks(met):
            result = Result(part=part.name, outcome="not here", problem=lacks)
        elif limit_s < _LEAST_S:
            result = Result(part=part.name, outcome="not reached", problem="the time was up")
        else:
            result = run(part, limit_s, environment)
        report.results.append(result)
        report.seconds = time.monotonic() - began
        report.write()
        print(f"{report.seconds:6.1f} s  {result.part}: {result.outcome} {result.problem}".rstrip(), flush=True)
    report.finished = True
    report.write()


def _usable(devices: list[dict[str, Any]]) -> dict[str, Any] | None:
    return next((one for one in devices if one["id"] == "webgpu:0" and not one["problem"]), None)


def _shown(machine: dict[str, Any]) -> str:
    """Returns the devices in one line."""
    devices = [f"{one['id']} ({one['problem'] or one['name']})" for one in machine["devices"]]
    return "; ".join(devices) or "no device: `blockrelay devices` has failed"


if __name__ == "__main__":
    sys.exit(main())
