"""Compares imported blocks with the original graphs in a process of the worker: services do not import each other.

An import may be used only after this comparison: only running a graph shows what it computes.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import ExecutionError, OnnxBlocksError, UsageError
from blockrelay.exit_codes import PREFIX, UNUSABLE
from blockrelay.onnx_blocks.llama.import_report import ComparedBlock, ComparedPlaces, decode_compared, encode_places

_COMPARE = "blockrelay_worker.offline.onnx_blocks.comparison.compare"
_EVALUATE = "blockrelay_worker.offline.evaluate"


def compare(
    originals: Path, imported: Path, places: ComparedPlaces, done: Callable[[ComparedBlock], None]
) -> tuple[ComparedBlock, ...]:
    """Compares all blocks and returns the results in order; `done` is called with each as it comes.

    Raises OnnxBlocksError that names the first block that differs from its original, or an original that cannot run;
    ExecutionError if the worker fails.
    """
    command = [sys.executable, "-P", "-m", _COMPARE, "--", str(originals), str(imported)]
    found: list[ComparedBlock] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as worker:
        assert worker.stdin is not None and worker.stdout is not None and worker.stderr is not None
        try:
            worker.stdin.write(encode_places(places).encode())
            worker.stdin.close()
            for line in worker.stdout:
                found.append(decode_compared(line))
                if found[-1].problem:
                    raise OnnxBlocksError(found[-1].problem)
                done(found[-1])
            last = worker.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
        except BaseException:
            worker.kill()
            raise
    if worker.returncode == UNUSABLE:
        raise OnnxBlocksError(last.removeprefix(PREFIX))
    if worker.returncode:
        raise ExecutionError(f"the blocks could not be compared: {last or f'exit code {worker.returncode}'}")
    return tuple(found)


def evaluated_cost(folder: Path, against: Path, text: Path) -> float:
    """Returns the share by which the perplexity of `folder` is above that of `against`, on 4,096 tokens of the text.

    Raises UsageError for a text that cannot be used, ExecutionError if the worker fails.
    """
    command = [sys.executable, "-P", "-m", _EVALUATE, "--json", "--text", str(text), "--tokens", "4096"]
    command += ["--model", str(folder), "--against", str(against)]
    done = subprocess.run(command, capture_output=True, check=False)
    last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2].removeprefix(PREFIX)
    if done.returncode == UNUSABLE:
        raise UsageError(last)
    if done.returncode:
        raise ExecutionError(f"the cost could not be measured: {last}")
    report = Fields.parse(done.stdout, _EVALUATE, ExecutionError)
    return report.number("cost")
