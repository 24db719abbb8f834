"""Histograms observed together must read as those of prometheus_client do."""

from prometheus_client import CollectorRegistry, Histogram

from blockrelay.observability.histograms import Histograms

BUCKETS = (0.1, 0.5, 1)


def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")  # of the library's histograms; services switch it off
    }


def test_reads_as_the_library_s_own() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    many = Histograms("h", "text", ("block", "device"), buckets=BUCKETS, registry=ours)
    single = Histogram("h", "text", ["block", "device"], buckets=BUCKETS, registry=theirs)
    for device, values in (("cpu", {"block_1": 0.1, "block_2": 0.6}), ("cpu", {"block_1": 7.0}), ("gpu", {"x": 0.0})):
        many.observe(values, device)
        for block, value in values.items():
            single.labels(block, device).observe(value)
    assert samples(ours) == samples(theirs)
    assert samples(ours), "nothing was compared"
