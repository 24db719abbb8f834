"""Reads utilisation, temperature and power of this machine's GPUs.

NVIDIA's GPUs by NVML if `nvidia-ml-py` is installed; others by files of the kernel (`/sys/class/drm`).
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
    """The sensors of one GPU at this moment; None for a sensor that it does not have."""

    gpu: str  # `nvidia0`, or the kernel's name: `card0`
    utilisation: float | None = None  # from 0 to 1
    temperature_celsius: float | None = None
    power_watts: float | None = None


def read_gpus() -> list[GpuReading]:
    """Returns the readings of all NVIDIA GPUs, and of other GPUs whose driver has a sensor."""
    return [*read_nvml(_nvml()), *read_drm(DRM)]


def read_drm(folder: Path) -> list[GpuReading]:
    """Returns the readings of all cards below `folder` (/sys/class/drm), without cards that have no sensor."""
    readings: list[GpuReading] = []
    for card in sorted(folder.glob("card[0-9]*")):
        device = card / "device"
        if not card.name.removeprefix("card").isdigit() or not device.is_dir():
            continue  # `card0-DP-1` is one of its connectors
        reading = GpuReading(
            gpu=card.name,
            utilisation=_number(_content(device / "gpu_busy_percent"), 100),
            temperature_celsius=_number(_first(device, "hwmon/hwmon*/temp1_input"), 1000),
            power_watts=_number(
                _first(device, "hwmon/hwmon*/power1_average") or _first(device, "hwmon/hwmon*/power1_input"), 1_000_000
            ),
        )
        if reading != GpuReading(gpu=card.name):
            readings.append(reading)
    return readings


def read_nvml(nvml: Any) -> list[GpuReading]:
    """Returns the readings of NVIDIA's GPUs; empty if `nvml` is None, or if the driver has gone.

    `nvml` is the module pynvml, initialised.
    """
    if nvml is None:
        return []

    def value(read: Callable[[], float], unit: float) -> float | None:
        try:
            return read() / unit
        except nvml.NVMLError:  # this GPU has no such sensor
            return None

    def each() -> Iterator[GpuReading]:
        for index in range(nvml.nvmlDeviceGetCount()):
            one = nvml.nvmlDeviceGetHandleByIndex(index)
            yield GpuReading(
                gpu=f"nvidia{index}",
                utilisation=value(lambda one=one: nvml.nvmlDeviceGetUtilizationRates(one).gpu, 100),
                temperature_celsius=value(lambda one=one: nvml.nvmlDeviceGetTemperature(one, 0), 1),
                power_watts=value(lambda one=one: nvml.nvmlDeviceGetPowerUsage(one), 1000),
            )

    try:
        return list(each())
    except nvml.NVMLError:  # the driver has gone
        return []


@cache
def _nvml() -> Any:
    """Returns the module pynvml, initialised; None if it or a driver is missing."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
    except ImportError:
        return None
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def _content(path: Path) -> str | None:
    with suppress(OSError):  # no such sensor, or the card sleeps
        return path.read_text().strip()
    return None


def _first(device: Path, pattern: str) -> str | None:
    """Returns the text of the first file of `pattern` that can be read and is not empty."""
    return next((text for path in sorted(device.glob(pattern)) if (text := _content(path))), None)


def _number(text: str | None, unit: float) -> float | None:
    return int(text) / unit if text and text.lstrip("-").isdigit() else None
