"""Builds the float kernels once per instruction set; everything else about the package is in pyproject.toml.

The modules are optional: without a C++ compiler the install succeeds and the NumPy kernels serve, slowly, which `up`,
`demo`, `status` and `devices` say (services/worker/blockrelay_worker/kernels/libraries.py). They are opened with
ctypes, so that no Python headers are needed.
"""

import os
import platform
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("services/worker/native")

# Bits must not depend on the optimiser: a fused multiply-add only where one is written, no reordering. Last, so that
# they win over flags from the environment.
FLAGS = [
    "-O3",
    "-std=c++17",
    "-pthread",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-fast-math",
    "-ffp-contract=off",
]

VARIANTS: dict[str, list[str]] = {"baseline": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    VARIANTS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    VARIANTS["avxvnni"] = [*VARIANTS["avx2"], "-mavxvnni"]
    VARIANTS["avx512"] = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"]
    VARIANTS["avx512vnni"] = [*VARIANTS["avx512"], "-mavx512vnni"]
    VARIANTS["amx"] = [*VARIANTS["avx512vnni"], "-mamx-tile", "-mamx-int8"]
elif platform.machine().lower() in ("aarch64", "arm64"):
    VARIANTS["dotprod"] = ["-march=armv8.2-a+dotprod"]
    VARIANTS["i8mm"] = ["-march=armv8.2-a+dotprod+i8mm"]

# Python asks for the compiler that it was built with itself, which is g++ as a rule.
own = (os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()[0]
if not shutil.which(own) and shutil.which("clang++"):
    os.environ |= {"CC": "clang", "CXX": "clang++"}

setup(
    ext_modules=[
        Extension(
            f"blockrelay_worker.kernels._{name}",
            [str(SOURCES / f"{name}.cpp")],
            depends=sorted(str(header) for header in SOURCES.glob("*.h")),
            extra_compile_args=[*flags, *FLAGS],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
        for name, flags in VARIANTS.items()
        if sys.platform != "win32"
    ]
)
