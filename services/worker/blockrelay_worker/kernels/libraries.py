"""The kernels' shared objects as the install left them: which are here, which this CPU can run, what is wrong with one.

`shortcoming` is what people read wherever slower code than this CPU could run serves.
"""

import ctypes
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

from blockrelay.extras import checkout

#: Bits of `blockrelay_cpu_features`.
AVX2, AVX512, VNNI, TILES = 1, 2, 4, 8
#: Variant to the features that it needs, fastest first. None needs tiles: they say nothing about the others.
VARIANTS: Final = {"avx512vnni": AVX2 | AVX512 | VNNI, "avx512": AVX2 | AVX512, "avx2": AVX2, "baseline": 0}

#: Raised, here and in kernels.h, with every change of a function's arguments or of the numbers.
LIBRARY_VERSION: Final = 6

FOLDER: Final = Path(__file__).parent
COMPILERS: Final = ("c++", "g++", "clang++")


@dataclass(frozen=True, slots=True)
class Library:
    """The shared object of a variant: its path, or None and what is wrong. `missing`: there is no file at all."""

    path: Path | None = None
    problem: str = ""
    missing: bool = False


def look(folder: Path, variant: str) -> Library:
    """What is in `folder` of a variant."""
    path = next((path for s in EXTENSION_SUFFIXES if (path := folder / f"_{variant}{s}").is_file()), None)
    if path is None:
        others = sorted(folder.glob(f"_{variant}.*"))
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
def library(variant: str) -> Library:
    """The one that the install put beside this file."""
    return look(FOLDER, variant)


@cache
def cpu_features() -> int:
    """What this CPU and its operating system can do, in bits; 0 also where no kernels were built to ask it."""
    baseline = library("baseline").path
    return 0 if baseline is None else int(ctypes.CDLL(str(baseline)).blockrelay_cpu_features())


def variants_for(features: int) -> tuple[str, ...]:
    """Variants that a CPU with these features can run, fastest first. Pure."""
    return tuple(name for name, needed in VARIANTS.items() if not needed & ~features)


@cache
def supported_variants() -> tuple[str, ...]:
    """Variants that were built and that this CPU (and operating system) can run, fastest first."""
    if library("baseline").path is None:
        return ()
    return tuple(name for name in variants_for(cpu_features()) if library(name).path is not None)


def has_tiles() -> bool:
    """Whether the CPU has AMX, whose products ONNX Runtime has and our kernels have not."""
    return bool(cpu_features() & TILES)


@cache
def shortcoming() -> str:
    """One line for people: which kernels this machine lacks, what computes in their place, and the remedy; empty where
    the fastest that its CPU can run serve."""
    if sys.platform == "win32":
        return "NumPy computes in place of our C++ kernels, some 30 times slower: there are none for Windows yet"
    wanted = variants_for(cpu_features())
    found = {name: library(name) for name in (*wanted, "baseline")}
    compiler = any(map(shutil.which, filter(None, (os.environ.get("CXX"), *COMPILERS))))
    return describe(wanted, found, compiler=compiler, source=checkout())


def describe(
    wanted: Sequence[str], found: Mapping[str, Library], *, compiler: bool, source: Path | None, folder: Path = FOLDER
) -> str:
    """`shortcoming` for a CPU that can run the variants `wanted`, fastest first, where the install put those `found`
    into `folder`; whether there is a `compiler` now, and the checkout they come from. Pure."""
    lacking = found["baseline"]
    if lacking.path is not None:
        serving = next(name for name in wanted if found[name].path is not None)
        if serving == wanted[0]:
            return ""
        lacking = found[wanted[0]]
        what = f"the C++ kernels for {serving} compute, more slowly than this CPU can: those for {wanted[0]}"
        install = "a newer g++ or clang++" if lacking.missing else ""
    else:
        what = "NumPy computes in place of our C++ kernels, some 30 times slower: they"
        install = "g++ or clang++" if not compiler else ""
    steps = [f"install {install}"] if install else []
    if found["baseline"].path is not None or not lacking.missing:
        steps.append(f"remove {folder}/_*.so")
    steps.append(f"`make install` again in {source}" if source else "install Blockrelay again")
    return f"{what} {lacking.problem}; {', then '.join(steps)}"
