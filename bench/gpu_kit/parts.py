"""The parts of a GPU test: the command of each, its time limit, and what it needs of the machine."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.gpu_kit.machine import ROOT
from bench.gpu_kit.report import Outcome, Result, last_lines

#: Seconds for all parts together.
ALL_S = 480.0
#: The environment variable with the path of the file to which a part writes its figures.
FIGURES = "GPU_KIT_FIGURES"
#: The exit code of a part that lacks something on this machine; its last line of output says what.
NOT_HERE = 77
#: The factor for all limits with small shapes, on a driver that computes on CPUs.
_SMALL_TIMES = 10.0
Need = Literal["device", "webgpu", "cuda", "torch"]
#: The message for a need that the machine does not meet.
LACKS: Mapping[Need, str] = {
    "device": "no device that can be used: see `devices` of the machine",
    "webgpu": "no device that WebGPU reaches: see `vulkan` and `devices` of the machine",
    "cuda": "no GPU that nvidia-smi shows",
    "torch": "no PyTorch",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the test, which runs in a process of its own."""

    name: str
    command: Sequence[str]
    """Arguments of Python."""
    limit_s: float
    needs: tuple[Need, ...] = ()
    figures: bool = False
    """True if its standard output is one JSON object of figures."""

    def lacks(self, is_met: Mapping[Need, bool]) -> str:
        """Returns the messages of its needs that are not met; empty if all are."""
        return "; ".join(LACKS[need] for need in self.needs if not is_met[need])


def parts(*, small: bool, float16: bool, work: Path) -> list[Part]:
    """Returns all parts, the most valuable first. Their limits and a minute of preparation add up to ALL_S.

    `small`: with small shapes, for a driver that computes on CPUs. `float16`: the device has it. `work` is a folder for
    models.
    """
    size = ["--small"] if small else []
    shape = str(work / "shape")
    suites = ["-m", "bench.gpu_kit.suites", *size, *(["--float16"] if float16 else [])]
    story = ["-m", "bench.gpu_kit.suites", "--story", *size]
    return [
        Part(
            name="known answers",
            command=["-m", "blockrelay_worker.offline.gpu_report"],
            limit_s=30,
            needs=("device",),
            figures=True,
        ),
        Part(name="CUDA known answer", command=["-m", "bench.gpu_kit.cuda"], limit_s=15, needs=("cuda",)),
        Part(name="executor suites", command=suites, limit_s=110, needs=("webgpu",)),
        Part(name="mixed route", command=story, limit_s=60, needs=("webgpu",)),
        Part(name="shape", command=["-m", "bench.gpu_kit.shape", shape, *size], limit_s=40),
        Part(name="speed", command=["-m", "bench.gpu_kit.speed", shape, *size], limit_s=60, needs=("webgpu",)),
        Part(
            name="PyTorch eager",
            command=["-m", "bench.gpu_kit.torch_llama", shape, *size],
            limit_s=30,
            needs=("torch",) if small else ("torch", "cuda"),
        ),
        Part(
            name="stall after a kill",
            command=[
                *("-m", "bench.scenarios.recovery", "--model", str(ROOT / "shared/blockrelay/models/storyteller")),
                *("--accidents", "device", "--device", "webgpu:0", "--json"),
                *("--times", "1" if small else "2", "--context", "56" if small else "200"),
                *("--patience", "300" if small else "30"),
            ],
            limit_s=75,
            needs=("webgpu",),
            figures=True,
        ),
    ]


def limit_of(part: Part, *, small: bool, left_s: float) -> float:
    """Returns the seconds that a part may take: its own limit, but no more than the `left_s` of the whole.

    With `small` shapes it is a multiple of its own limit, whatever is left of the whole.
    """
    return part.limit_s * _SMALL_TIMES if small else min(part.limit_s, left_s)


def run(part: Part, limit_s: float, environment: Mapping[str, str]) -> Result:
    """Runs a part and returns its result. Its whole process group ends with it, or at the limit."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as folder:
        figures, out, err = (Path(folder) / name for name in ("figures", "out", "err"))
        with out.open("wb") as to, err.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, *part.command],
                cwd=ROOT,
                env={**environment, FIGURES: str(figures), "PYTHONUNBUFFERED": "1"},
                stdout=to,
                stderr=errors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            code: int | None = None
            with suppress(subprocess.TimeoutExpired), _ended(process):
                code = process.wait(limit_s)
        printed = out.read_text(errors="replace")
        values = _object(printed) if part.figures else _object(figures.read_text() if figures.exists() else "")
        outcome, problem = judged(code, printed, values)
        return Result(
            part=part.name,
            outcome=outcome,
            seconds=round(time.monotonic() - began, 1),
            limit_s=round(limit_s, 1),
            problem=problem,
            figures=values,
            said=[] if outcome == "passed" else last_lines(printed + err.read_text(errors="replace")),
        )


def judged(code: int | None, printed: str, figures: Mapping[str, Any]) -> tuple[Outcome, str]:
    """Returns the outcome of a part and its problem, by its exit code (None: it was killed) and its figures.

    Figures may have `trials`, each with a `problem` if it failed.
    """
    if code is None:
        return "too slow", "it was ended at its limit"
    if code == NOT_HERE:
        return "not here", (printed.strip().splitlines() or ["it does not say what"])[-1]
    if code:
        how = f"exit code {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"
        return "failed", how
    if wrong := [str(trial["problem"]) for trial in figures.get("trials", ()) if trial.get("problem")]:
        return "failed", "; ".join(wrong)
    return "passed", ""


@contextmanager
def _ended(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Kills the process group of a part at the end, with the systems that the part has started."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _object(text: str) -> dict[str, Any]:
    """Returns the JSON object that begins at the first brace of `text`; {} without one."""
    start = text.find("{")
    try:
        value: Any = json.loads(text[start:]) if start >= 0 else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def tell(figures: Mapping[str, Any]) -> None:
    """Writes the figures that a part has so far to its file; prints them if the part runs outside of a test."""
    path = os.environ.get(FIGURES)
    if path is None:
        print(json.dumps(figures, indent=1))
        return
    draft = Path(f"{path}.draft")
    draft.write_text(json.dumps(figures))
    draft.replace(path)
