"""`python -m tests.fuzz.campaign --runs N`: N inputs over all targets of `targets.py`, guided by coverage (atheris).

Exit code 1 after a fault; the input that shows it is kept in `--found`, and the traceback is printed.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import atheris  # pyright: ignore[reportMissingImports]  # only in the environment of `make fuzz`

with atheris.instrument_imports(include=["blockrelay", "blockrelay_worker"]):
    from tests.support.fuzz_targets import TARGETS, attempt

LONGEST = 1024  # bytes of an input; the seeds of most targets are shorter


def main() -> int:
    """The exit code; see above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs in all")
    parser.add_argument("--found", type=Path, default=Path(".fuzz"), help="folder for inputs that show a fault")
    parser.add_argument("--only", choices=TARGETS, help="one target")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.found.mkdir(exist_ok=True)
    if options.inside:
        _fuzz(options.only, options.runs, options.found)
    names = [options.only] if options.only else list(TARGETS)
    each = -(-options.runs // len(names))
    failed = [name for name in names if _in_a_process(name, each, options.found)]
    print(f"{each * len(names)} inputs, faults in: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _in_a_process(name: str, runs: int, found: Path) -> bool:
    """atheris ends the process it ran in."""
    command = [sys.executable, "-m", "tests.fuzz.campaign", "--inside", "--only", name]
    result = subprocess.run([*command, "--runs", str(runs), "--found", str(found)], capture_output=True, text=True)
    if result.returncode:
        print(f"FAULT in {name}:\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}")
    else:
        print(f"{name}: {runs} inputs")
    return bool(result.returncode)


def _fuzz(name: str, runs: int, found: Path) -> None:
    with tempfile.TemporaryDirectory() as corpus:
        for index, seed in enumerate(TARGETS[name].seeds):
            (Path(corpus) / str(index)).write_bytes(seed)
        prefix = f"-artifact_prefix={found}/{name.replace(' ', '-')}-"
        arguments = [f"-runs={runs}", f"-max_len={LONGEST}", "-timeout=10", "-rss_limit_mb=2048", prefix]
        atheris.Setup([sys.argv[0], *arguments, corpus], lambda data: attempt(name, data))
        atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
