"""How busy, hot and hungry the GPUs of this machine are, as far as their drivers tell.

NVIDIA's by NVML where `nvidia-ml-py` is installed; others by the files of the kernel (`/sys/class/drm`).
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DRM = Path("/sys/class/drm")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """What one GPU says now; None: it does not tell. `utilisation` is a share, from 0 to 1."""

    gpu: str
    utilisation: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None


def read_gpus() -> list[GpuReading]:
    """The readings of every GPU whose driver has any sensor."""
    return [*read_nvml(_nvml()), *read_drm(DRM)]


def read_drm(folder: Path) -> list[GpuReading]:
    """What the kernel's files say, by card; a card that says nothing is left out."""
    found: list[GpuReading] = []
    for card in sorted(folder.glob("card[0-9]*")):
        device = card / "device"
        if not card.name.removeprefix("card").isdigit() or not device.is_dir():
            continue  # `card0-DP-1` is one of its connectors
        reading = GpuReading(
            gpu=card.name,
            utilisation=_number(_of_file(device / "gpu_busy_percent"), 100),
            temperature_celsius=_number(_first(device, "hwmon/hwmon*/temp1_input"), 1000),
            power_watts=_number(
                _first(device, "hwmon/hwmon*/power1_average") or _first(device, "hwmon/hwmon*/power1_input"), 1_000_000
            ),
        )
        if reading != GpuReading(gpu=card.name):
            found.append(reading)
    return found


def read_nvml(nvml: Any) -> list[GpuReading]:
    """What NVML says (a module with its functions, initialised), by index; None: nothing."""
    if nvml is None:
        return []

    def told(ask: Callable[[], float], unit: float) -> float | None:
        try:
            return ask() / unit
        except nvml.NVMLError:  # this GPU has no such sensor
            return None

    def each() -> Iterator[GpuReading]:
        for index in range(nvml.nvmlDeviceGetCount()):
            one = nvml.nvmlDeviceGetHandleByIndex(index)
            yield GpuReading(
                gpu=f"nvidia{index}",
                utilisation=told(lambda one=one: nvml.nvmlDeviceGetUtilizationRates(one).gpu, 100),
                temperature_celsius=told(lambda one=one: nvml.nvmlDeviceGetTemperature(one, 0), 1),
                power_watts=told(lambda one=one: nvml.nvmlDeviceGetPowerUsage(one), 1000),
            )

    try:
        return list(each())
    except nvml.NVMLError:  # the driver has gone
        return []


@cache
def _nvml() -> Any:
    """The module, or None where it or a driver is missing."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
    except ImportError:
        return None
    found: Any = pynvml
    try:
        found.nvmlInit()
    except found.NVMLError:
        return None
    return found


def _of_file(path: Path) -> str | None:
    with suppress(OSError):  # no such sensor, or the card sleeps
        return path.read_text().strip()
    return None


def _first(device: Path, pattern: str) -> str | None:
    """The text of the first file that can be read."""
    return next((text for path in sorted(device.glob(pattern)) if (text := _of_file(path))), None)


def _number(text: str | None, unit: float) -> float | None:
    return int(text) / unit if text and text.lstrip("-").isdigit() else None
