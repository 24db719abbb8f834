"""Sensors of GPUs: folders as the kernel has them, a library as NVIDIA's is, and machines without either."""

from pathlib import Path
from types import SimpleNamespace

from prometheus_client import CollectorRegistry

from blockrelay.host.gpu_sensors import GpuReading, read_drm, read_gpus, read_nvml
from blockrelay.observability.sensors import Sensors


def card(folder: Path, name: str, **files: str) -> None:
    """Files of its device; `hwmon_` before a name: of its sensor."""
    device = folder / name / "device"
    (device / "hwmon" / "hwmon3").mkdir(parents=True)
    for file, text in files.items():
        where = device / "hwmon" / "hwmon3" if file.startswith("hwmon_") else device
        (where / file.removeprefix("hwmon_")).write_text(text + "\n")


def test_a_card_tells_what_its_files_say(tmp_path: Path) -> None:
    card(tmp_path, "card0", gpu_busy_percent="37", hwmon_temp1_input="54000", hwmon_power1_average="121000000")
    card(tmp_path, "card1", hwmon_temp1_input="-5000", hwmon_power1_input="7500000", gpu_busy_percent="busy")
    card(tmp_path, "card2")
    (tmp_path / "card0-DP-1").mkdir()
    (tmp_path / "renderD128").mkdir()
    assert read_drm(tmp_path) == [
        GpuReading(gpu="card0", utilisation=0.37, temperature_celsius=54.0, power_watts=121.0),
        GpuReading(gpu="card1", temperature_celsius=-5.0, power_watts=7.5),
    ]
    assert read_drm(tmp_path / "none") == []


class NVMLError(Exception):
    pass


def test_nvml_is_asked_for_each_gpu_and_may_not_know_everything() -> None:
    def power(_: int) -> int:
        raise NVMLError

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,  # pyright: ignore[reportUnknownLambdaType]
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=80),  # pyright: ignore[reportUnknownLambdaType]
        nvmlDeviceGetTemperature=lambda _, sensor: 61 if sensor == 0 else -1,  # pyright: ignore[reportUnknownLambdaType]
        nvmlDeviceGetPowerUsage=power,
    )
    assert read_nvml(nvml) == [GpuReading(gpu="nvidia0", utilisation=0.8, temperature_celsius=61.0)]
    assert read_nvml(None) == []


def test_what_is_not_told_has_no_series_and_a_machine_without_gpus_is_no_error() -> None:
    registry = CollectorRegistry()
    Sensors(registry, lambda: [GpuReading(gpu="card0", utilisation=0.5)])
    assert registry.get_sample_value("blockrelay_worker_gpu_utilisation_ratio", {"gpu": "card0"}) == 0.5
    assert registry.get_sample_value("blockrelay_worker_gpu_power_watts", {"gpu": "card0"}) is None
    assert all(reading.gpu for reading in read_gpus())
