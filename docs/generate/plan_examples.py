"""One worked example of each strategy in docs/plans.md, as the command prints it."""

import io
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from blockrelay_scheduler.plan_command.__main__ import run

#: Two machines that are described, so that the figures are the same wherever the page is written: slow ones, for which
#: the bundled model is as heavy as a large one is for a computer of today.
DEVICES: dict[str, Any] = {
    "devices": [
        {"id": "cpu:0", "class": "CPU", "host": "a", "memory_bytes": 16000000,
         "bytes_per_second": 5e8, "operations_per_second": 1e10},
        {"id": "gpu0", "class": "GPU", "host": "b", "memory_bytes": 5000000,
         "bytes_per_second": 1e9, "operations_per_second": 2e10},
    ],
    "links": [{"between": ["a", "b"], "seconds": 5e-05, "seconds_per_byte": 1e-09}],
}  # fmt: skip
DEVICES_OPTION = ("--devices", "devices.json")
PROMISE = ("--context", "128", "--requests", "4")
EXAMPLES: Sequence[tuple[str, str, Sequence[str]]] = (
    ("auto for one request", "The GPU has room for most blocks, and two hops cost less than the CPU does.",
     ("--objective", "latency")),
    ("auto for many", "With 64 requests the GPU is what a step waits for: it gets a block less.",
     ("--objective", "throughput", "--context", "8", "--requests", "64")),
    ("uniform", "Six layers in two parts; the head rides along with the second.",
     ("--strategy", "uniform", "--targets", "cpu:0,gpu0")),
    ("memory", "Both devices are filled to about the same share.",
     ("--strategy", "memory", "--targets", "cpu:0,gpu0")),
    ("compute", "The slower stage is as fast as can be: the slow device gets little.",
     ("--strategy", "compute", "--targets", "cpu:0,gpu0")),
    ("mixed", "Between the two.", ("--strategy", "mixed", "--targets", "cpu:0,gpu0")),
    ("custom", "A split written by hand, checked for gaps and for room.",
     ("--strategy", "custom", "--boundaries", "1-4,5-7", "--targets", "gpu0,cpu:0")),
    ("static-split", "Every k from 0 to 7 is tried.", ("--strategy", "static-split")),
    ("ring", "The device with the most memory begins.", ("--strategy", "ring")),
    ("ring-speed", "The fastest device begins.", ("--strategy", "ring-speed")),
)  # fmt: skip
_HEAD = """
One of each [strategy](#strategies), for the bundled model on two devices that are described, not profiled: a slow one
with much memory and a fast one with little. Both are so slow that this small model is as heavy for them as a large one
is for a computer of today.

```sh
cat > devices.json <<'END'
{devices}
END
cat devices.json
```
"""


def examples() -> str:
    """Returns the description of the devices, and a command with its output for each strategy."""
    text = _HEAD.format(devices=json.dumps(DEVICES, indent=1))
    with TemporaryDirectory() as folder, _inside(Path(folder)):
        Path("devices.json").write_text(json.dumps(DEVICES))
        for title, sentence, options in EXAMPLES:
            given = (*options, *DEVICES_OPTION, *(() if "--requests" in options else PROMISE))
            shown = " ".join(("blockrelay plan", *given))
            text += f"\n### {title}\n\n{sentence}\n\n```sh\n{shown}\n```\n\n```text\n{_printed(*given)}```\n"
    return text


def _printed(*arguments: str) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        code = run(list(arguments))
    assert code == 0, f"{arguments} ended with {code}"
    return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Run the block in a folder, on a terminal of 80 columns, with the environment active."""
    before, outside = Path.cwd(), dict(os.environ)
    os.chdir(folder)
    os.environ |= {"COLUMNS": "80", "PATH": f"{sysconfig.get_path('scripts')}:{outside.get('PATH', '')}"}
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(outside)
