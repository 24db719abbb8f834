"""Options, measurements and output that all peers' scripts share. It runs in a peer's environment, with NumPy only.

A script is called with CHECKPOINT WORK and options, converts the checkpoint into WORK if that has not been done, and
prints one JSON object per case: precision, requests, prompt, prefill_ms (until every request has its first token) and
decode_tok_s (tokens after the first ones over the time from there to the end, all requests together). Where the times
give no such figures the object has an error instead.
"""

import argparse
import ctypes
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

#: Bytes of a faulting instruction that are reported: no instruction is longer.
INSTRUCTION_BYTES = 15
#: New tokens of the unmeasured round before each measured one.
WARM_UP_NEW = 2
#: Pairs of runs, for one token and for all, of a peer that does not report when its first tokens come.
TURNS = 3


@dataclass(frozen=True)
class Options:
    """The options of a script."""

    checkpoint: Path
    work: Path
    cases: tuple[tuple[int, int, int], ...]  # (requests, prompt, new)
    precisions: tuple[str, ...]
    threads: int
    convert_only: bool


def read_options(precisions: tuple[str, ...]) -> Options:
    """Parses the command line. `precisions` are those that the peer has, and the default."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--cases", default="1x128x64,4x128x64,16x128x64", help="REQUESTSxPROMPTxNEW, with commas")
    parser.add_argument("--precisions", default=",".join(precisions))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--convert-only", action="store_true")
    given = parser.parse_args()
    report_deaths()
    cases = [tuple(int(part) for part in case.split("x")) for case in given.cases.split(",")]
    given.work.mkdir(parents=True, exist_ok=True)
    chosen = tuple(given.precisions.split(","))
    return Options(given.checkpoint, given.work, tuple(cases), chosen, given.threads, given.convert_only)


class _Place(ctypes.Structure):
    """What dladdr() says of an address (Dl_info)."""

    _fields_ = (
        ("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("symbol", ctypes.c_char_p), ("start", ctypes.c_void_p),
    )  # fmt: skip


def report_deaths() -> None:
    """Makes this process print the faulting instruction when the CPU does not have it, before the signal kills it.

    A library that was built for another CPU dies so; its name, the place in it and the bytes there say why.
    """
    if sys.platform != "linux":
        return
    libc, action = ctypes.CDLL(None), ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

    def died(number: int, info: int, _: int) -> None:
        # siginfo_t of 64-bit Linux: three ints and padding, then the address of the instruction.
        address = ctypes.c_void_p.from_address(info + 16).value or 0
        place = _Place()
        libc.dladdr(ctypes.c_void_p(address), ctypes.byref(place))
        code = ctypes.string_at(address, INSTRUCTION_BYTES).hex(" ") if address else "?"
        where = f"{os.path.basename(os.fsdecode(place.file or b'?'))}+0x{address - (place.base or 0):x}"
        os.write(2, f"error: {signal.Signals(number).name} at {where}: {code}\n".encode())
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    _kept.append(action(died))
    # struct sigaction of 64-bit Linux: the handler, a mask of 128 bytes, flags (SA_SIGINFO is 4).
    what = (ctypes.c_void_p * 19)()
    what[0], what[17] = ctypes.cast(_kept[-1], ctypes.c_void_p).value, 4
    libc.sigaction(signal.SIGILL, ctypes.byref(what), None)


_kept: list = []  # handlers: C calls them


def prompts(requests: int, length: int) -> np.ndarray:
    """Returns random token ids [requests, length], different at every call, so that no cache helps."""
    return np.random.default_rng().integers(10, 6000, (requests, length))


def measure(options: Options, precision: str, run: Callable[[int, int, int], Iterator[None]]) -> None:
    """Times every case, after an unmeasured round of it, and prints the figures.

    `run(requests, prompt, new)` yields when every request has its first token, and again when all have ended.
    """
    for requests, prompt, new in options.cases:
        times = []
        for tokens in (WARM_UP_NEW, new):
            times = [time.perf_counter()]
            times += [time.perf_counter() for _ in run(requests, prompt, tokens)]
        say(precision, (requests, prompt, new), times[1] - times[0], times[2] - times[1])


def measure_whole(options: Options, precision: str, seconds: Callable[[int, int, int], float]) -> None:
    """Times every case of a peer that reports only the seconds of a whole run: `seconds(requests, prompt, new)`.

    The time of a run for one token is subtracted from that of a run for all. The time to compute a long prompt varies
    by more than a few tokens take, so the two runs take turns, and the median of the differences counts.
    """
    for case in options.cases:
        requests, prompt, new = case
        seconds(requests, prompt, WARM_UP_NEW)
        pairs = [(seconds(requests, prompt, 1), seconds(requests, prompt, new)) for _ in range(TURNS)]
        decode = statistics.median(whole - first for first, whole in pairs)
        say(precision, case, statistics.median(first for first, _ in pairs), decode)


def say(precision: str, case: tuple[int, int, int], prefill_s: float, decode_s: float) -> None:
    """Prints the figures of a case as one JSON object."""
    requests, prompt, new = case
    figure = {"precision": precision, "requests": requests, "prompt": prompt}
    if prefill_s > 0 and decode_s > 0:
        rate = requests * (new - 1) / decode_s
        figure |= {"prefill_ms": round(prefill_s * 1e3, 1), "decode_tok_s": round(rate, 2)}
    else:
        figure["error"] = f"{new - 1} tokens behind the first took {decode_s:.3f} s, the prompt {prefill_s:.3f} s"
    sys.stdout.write(json.dumps(figure) + "\n")
    sys.stdout.flush()
