"""What a scrape of `/metrics` gives, read with Prometheus' own parser."""

from prometheus_client.parser import text_string_to_metric_families

from blockrelay import __version__
from blockrelay.protocol.number import PROTOCOL


def assert_service_describes_itself(text: str, service: str) -> None:
    """The build and the process are there, and no series tells only when a counter was created."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    (build,) = [sample for sample in samples if sample.name == "blockrelay_build_info"]
    assert build.value == 1
    assert build.labels == {"service": service, "version": __version__, "protocol": str(PROTOCOL)}
    values = {sample.name: sample.value for sample in samples}
    assert values["process_resident_memory_bytes"] > 1e6
    assert values["process_cpu_seconds_total"] > 0
    assert values["process_open_fds"] > 0
    assert "python_info" in values
    assert not [name for name in values if name.endswith("_created")]
