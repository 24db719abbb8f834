"""What a scrape of `/metrics` gives, read with Prometheus' own parser."""

from prometheus_client.parser import text_string_to_metric_families

from blockrelay import __version__
from blockrelay.protocol.number import PROTOCOL


def sampled(text: str, name: str, **labels: str) -> float:
    """The sum of all samples of this name (with `_total`, `_count`...) that have these labels, whatever others."""
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items())


def assert_service_describes_itself(text: str, service: str) -> None:
    """The build and the process are there, and no series tells only when a counter was created."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    (build,) = [sample for sample in samples if sample.name == "blockrelay_build_info"]
    assert build.value == 1
    assert build.labels.items() >= {"service": service, "version": __version__, "protocol": str(PROTOCOL)}.items()
    ours = [sample for sample in samples if sample.name.startswith("blockrelay_")]
    assert not [sample for sample in ours if not {"cell", "model"} <= sample.labels.keys()]
    values = {sample.name: sample.value for sample in samples}
    assert values["process_resident_memory_bytes"] > 1e6
    assert values["process_cpu_seconds_total"] > 0
    assert values["process_open_fds"] > 0
    assert "python_info" in values
    assert not [name for name in values if name.endswith("_created")]
