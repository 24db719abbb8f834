"""Finds the kernels' shared objects that are installed, checks them, and tells which of them this CPU can run.

`shortcoming` is the message for users of a machine whose kernels are slower than its CPU allows.
"""

import ctypes
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

from blockrelay.extras import checkout

#: Bits of the result of `blockrelay_cpu_features`.
AVX2, AVX512, VNNI, TILES, AVX_VNNI, SDOT, SMMLA = 1, 2, 4, 8, 16, 32, 64
#: CPU features that each variant needs, fastest variant first.
ISAS: Final = {
    "i8mm": SDOT | SMMLA,
    "dotprod": SDOT,
    "amx": AVX2 | AVX512 | VNNI | TILES,
    "avx512vnni": AVX2 | AVX512 | VNNI,
    "avxvnni": AVX2 | AVX_VNNI,
    "avx512": AVX2 | AVX512,
    "avx2": AVX2,
    "baseline": 0,
}

#: Version of the functions' arguments and numbers; to be raised together with the one in kernels.h.
LIBRARY_VERSION: Final = 15

_log = logging.getLogger(__name__)
FOLDER: Final = Path(__file__).parent
COMPILERS: Final = ("c++", "g++", "clang++")


#: Seconds that the trial of tiles may take, in a process of its own.
_TRIAL_S = 30.0
_TRIAL = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).blockrelay_try_tiles() != 1)"


@dataclass(frozen=True, slots=True)
class Library:
    """The shared object of a variant, or the reason why it cannot be used."""

    path: Path | None = None
    """Path of a usable shared object; None if there is none."""
    problem: str = ""
    """End of the sentence "the kernels ...": why there is none."""
    missing: bool = False
    """True if no file was found at all."""


def look(folder: Path, isa: str) -> Library:
    """Returns the shared object of a variant in `folder`, after loading it and checking its version."""
    path = next((path for s in EXTENSION_SUFFIXES if (path := folder / f"_{isa}{s}").is_file()), None)
    if path is None:
        others = sorted(folder.glob(f"_{isa}.*"))
        problem = f"are for another Python or machine ({others[0].name})" if others else "are missing"
        return Library(problem=problem, missing=not others)
    try:
        version = int(ctypes.CDLL(str(path)).blockrelay_version())
    except OSError as error:
        return Library(problem=f"cannot be loaded ({error})")
    except AttributeError:  # before versions
        return Library(problem="are of another release")
    if version != LIBRARY_VERSION:
        return Library(problem=f"are of another release (version {version}, not {LIBRARY_VERSION})")
    return Library(path)


@cache
def library(isa: str) -> Library:
    """Returns the shared object of a variant that the install put beside this file."""
    return look(FOLDER, isa)


@cache
def cpu_features() -> int:
    """Returns the features of this CPU and operating system, as bits; 0 if the `baseline` kernels are missing.

    TILES is among them if this process may use tiles. Where our kernels for them are installed, a trial in another
    process must have given the right sums: some machines say that they have tiles, and end who uses them.
    """
    baseline = library("baseline").path
    features = 0 if baseline is None else int(ctypes.CDLL(str(baseline)).blockrelay_cpu_features())
    tiles = library("amx").path if features & TILES else None
    return features & ~TILES if tiles is not None and not tiles_work(tiles) else features


def tiles_work(path: Path) -> bool:
    """Returns whether the shared object at `path`, of the variant `amx`, multiplies two tiles right on this machine.

    A process of its own tries, because it may end by SIGILL. A failure is logged.
    """
    trial = [sys.executable, "-S", "-c", _TRIAL, str(path)]
    try:
        status = subprocess.run(trial, stdin=subprocess.DEVNULL, check=False, timeout=_TRIAL_S).returncode
    except subprocess.TimeoutExpired:
        status = None
    if status != 0:
        _log.warning("the CPU says that it has AMX tiles, and a trial of them failed (%s): VNNI serves", status)
    return status == 0


def isas_for(features: int) -> tuple[str, ...]:
    """Returns the variants that a CPU with these features can run, fastest first. Pure."""
    return tuple(name for name, needed in ISAS.items() if not needed & ~features)


@cache
def supported_isas() -> tuple[str, ...]:
    """Returns the installed variants that this CPU and operating system can run, fastest first.

    Without `baseline`, which tells the CPU's features, there are none.
    """
    if library("baseline").path is None:
        return ()
    return tuple(name for name in isas_for(cpu_features()) if library(name).path is not None)


def has_tiles() -> bool:
    """Returns whether the CPU has AMX tiles that this process may use: ONNX Runtime's int8 matmuls use them too."""
    return bool(cpu_features() & TILES)


@cache
def shortcoming() -> str:
    """Returns one line for users: the kernels that this machine lacks, what computes instead, and the remedy.

    It is empty if the fastest kernels that the CPU can run are installed.
    """
    if sys.platform == "win32":
        return "NumPy computes in place of our C++ kernels, some 30 times slower: there are none for Windows yet"
    wanted = isas_for(cpu_features())
    libraries = {name: library(name) for name in (*wanted, "baseline")}
    compiler = any(map(shutil.which, filter(None, (os.environ.get("CXX"), *COMPILERS))))
    return describe(wanted, libraries, compiler=compiler, source=checkout())


def describe(
    wanted: Sequence[str],
    libraries: Mapping[str, Library],
    *,
    compiler: bool,
    source: Path | None,
    folder: Path = FOLDER,
) -> str:
    """Returns the line of `shortcoming`. Pure.

    `wanted`: variants that the CPU can run, fastest first. `libraries`: those variants and `baseline`, as installed in
    `folder`. `compiler`: True if a C++ compiler is installed now. `source`: the checkout, None for an installed wheel.
    """
    lacking = libraries["baseline"]
    if lacking.path is not None:
        serving = next(name for name in wanted if libraries[name].path is not None)
        if serving == wanted[0]:
            return ""
        lacking = libraries[wanted[0]]
        what = f"the C++ kernels for {serving} compute, more slowly than this CPU can: those for {wanted[0]}"
        install = "a newer g++ or clang++" if lacking.missing else ""
    else:
        what = "NumPy computes in place of our C++ kernels, some 30 times slower: they"
        install = "g++ or clang++" if not compiler else ""
    steps = [f"install {install}"] if install else []
    if libraries["baseline"].path is not None or not lacking.missing:
        steps.append(f"remove {folder}/_*.so")
    steps.append(f"`make install` again in {source}" if source else "install Blockrelay again")
    return f"{what} {lacking.problem}; {', then '.join(steps)}"
