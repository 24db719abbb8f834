"""Writes the folder that is copied to a machine with a GPU (`make gpu-kit`). Needs a network.

    python -m bench.gpu_kit.make [build/gpu-kit]

It contains wheels of the versions in requirements.lock for the Python of that machine, repacked with LZMA, which pip
reads too; the kernels built here, which work with any version of Python; Vulkan's loader and the libraries that
NVIDIA's driver is linked with, from Debian's packages; and the script `run`.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

from bench.gpu_kit.contents import (
    DEBIAN_PACKAGES,
    KERNELS,
    LEFT_OUT,
    LIBRARIES,
    PLATFORMS,
    PYTHON,
    ROOTS,
    WHEELS,
    canonical,
    fits,
    pins_of,
    too_large,
    wheel_of,
)

ROOT = Path(__file__).parents[2]
#: Bytes above which a wheel is repacked.
_LARGE = 1_000_000
_RUN = """#!/bin/sh
# Proves a GPU (docs/gpu.md): build/gpu-kit/run [REPORT.json]. PYTHON names the Python that has NumPy and PyTorch.
cd "$(dirname "$0")/../.." && exec "${PYTHON:-python3}" -m bench.gpu_kit --kit build/gpu-kit "$@"
"""


def needed(pins: dict[str, str]) -> list[str]:
    """Returns NAME==VERSION of all packages that ROOTS need, by the metadata of the packages installed here.

    `pins` are the versions by name. Raises SystemExit for a package without one.
    """
    packages: set[str] = set()
    visited: set[tuple[str, str]] = set()

    def visit(name: str, extras: Sequence[str]) -> None:
        if name in LEFT_OUT:
            return
        for extra in ("", *extras):
            if (name, extra) in visited:
                continue
            visited.add((name, extra))
            packages.add(name)
            if name == "onnxruntime-ep-webgpu":  # not installed here; it needs only ONNX Runtime, which is a root's
                continue
            for line in distribution(name).requires or ():
                requirement = Requirement(line)
                where = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.3", "extra": extra}
                if requirement.marker is None or requirement.marker.evaluate(where):
                    visit(canonical(requirement.name), sorted(requirement.extras))

    for name, extras in ROOTS.items():
        visit(name, extras)
    packages.discard("blockrelay")
    if unlocked := sorted(packages - pins.keys()):
        raise SystemExit(f"not in requirements.lock: {', '.join(unlocked)}; run `make lock`")
    return [f"{name}=={pins[name]}" for name in sorted(packages)]


def _download(into: Path, before: Path) -> None:
    """Downloads and packs the wheels. Those in the folder `before` are copied, because packing takes minutes."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--quiet", "--disable-pip-version-check", "--no-deps"]
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON, "--dest", str(into)]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    kept = {"==".join(wheel_of(wheel.name)): wheel for wheel in before.glob("*.whl") if fits(wheel.name)}
    wanted = needed(pins_of((ROOT / "requirements.lock").read_text()))
    for name in kept.keys() & set(wanted):
        shutil.copy2(kept[name], into)
    if missing := sorted(set(wanted) - kept.keys()):
        subprocess.run([*pip, *target, *platforms, *missing], check=True)
    if wrong := [one.name for one in into.iterdir() if not fits(one.name)]:
        raise SystemExit(f"not for CPython {PYTHON} on x86-64 Linux: {', '.join(wrong)}")
    for wheel in into.iterdir():
        if wheel.stat().st_size > _LARGE and not _is_packed(wheel):
            _pack(wheel)


def _is_packed(wheel: Path) -> bool:
    with zipfile.ZipFile(wheel) as archive:
        return any(entry.compress_type == zipfile.ZIP_LZMA for entry in archive.infolist())


def _pack(wheel: Path) -> None:
    """Packs a wheel with LZMA. It stays valid, because a wheel records the hashes of its unpacked files."""
    smaller = wheel.with_suffix(".smaller")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_LZMA) as new:
        for entry in old.infolist():
            same = zipfile.ZipInfo(entry.filename, entry.date_time)
            same.external_attr, same.compress_type = entry.external_attr, zipfile.ZIP_LZMA
            new.writestr(same, old.read(entry))
    smaller.rename(wheel)


def _copy_kernels(into: Path) -> None:
    """Packs the kernels that are built here. Raises SystemExit if there are none."""
    spec = find_spec("blockrelay_worker.kernels")
    assert spec is not None and spec.origin is not None
    built = sorted(Path(spec.origin).parent.glob("_*.so"))
    if not built:
        raise SystemExit("no kernels are built here: `make install` needs a C++ compiler")
    with zipfile.ZipFile(into, "w", zipfile.ZIP_LZMA) as packed:
        for kernel in built:
            packed.write(kernel, f"{kernel.name.split('.')[0]}.so")


def _get_libraries(into: Path) -> None:
    """Packs the libraries from Debian's packages. apt gets lists of its own, so that it needs no rights here."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        print("no apt-get and dpkg here: the kit has no Vulkan loader, and the machine needs its own")
        return
    with tempfile.TemporaryDirectory() as folder:
        lists = Path(folder) / "lists"
        (lists / "partial").mkdir(parents=True)
        apt = ["apt-get", "-qq", "-o", "Debug::NoLocking=1", "-o", f"Dir::State::Lists={lists}"]
        apt += ["-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache=", "-o", "APT::Sandbox::User="]
        apt += ["-o", "APT::Architecture=amd64", "-o", "APT::Architectures=amd64"]
        for command in (["update"], ["download", *DEBIAN_PACKAGES]):
            subprocess.run([*apt, *command], cwd=folder, check=True)
        for package in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg", "-x", package.name, "unpacked"], cwd=folder, check=True)
        with zipfile.ZipFile(into, "w", zipfile.ZIP_LZMA) as packed:
            for library in sorted((Path(folder) / "unpacked").rglob("lib*.so.?")):  # the names that programs load
                packed.writestr(library.name, library.read_bytes(), zipfile.ZIP_LZMA)


def make(out: Path) -> None:
    """Writes the folder, whole or not at all. Raises SystemExit if it is too large."""
    draft = out.with_name(f"{out.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    (draft / WHEELS).mkdir(parents=True)
    _download(draft / WHEELS, out / WHEELS)
    _copy_kernels(draft / KERNELS)
    _get_libraries(draft / LIBRARIES)
    (draft / "run").write_text(_RUN)
    (draft / "run").chmod(0o755)
    files = {str(file.relative_to(draft)): file.stat().st_size for file in draft.rglob("*") if file.is_file()}
    if problem := too_large(files):
        raise SystemExit(problem)
    shutil.rmtree(out, ignore_errors=True)
    draft.rename(out)
    print(f"{out}: {len(files)} files, {sum(files.values()):,} bytes")


def main() -> int:
    """Writes the folder and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=Path("build/gpu-kit"))
    make(parser.parse_args().out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
