"""Metrics of all services: names that say whose a series is, the common labels, series that exist from the start."""

from collections.abc import Callable
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from blockrelay.observability.metrics.gateway import GatewayMetrics
from blockrelay.observability.metrics.scheduler import SchedulerMetrics
from blockrelay.observability.metrics.totals import Totals
from blockrelay.observability.metrics.whose import BOOKS, taken
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.observability.registry import service_registry
from blockrelay.redis.registry import Accounting
from tests.support.scraping import sampled

GROUPS: dict[str, Callable[[CollectorRegistry], object]] = {
    "gateway": GatewayMetrics,
    "scheduler": SchedulerMetrics,
    "worker": WorkerMetrics,
}


def instruments(service: str) -> dict[str, Any]:
    """Returns the instruments of a service, by the names of their families."""
    registry = CollectorRegistry()
    GROUPS[service](registry)
    collectors: Any = cast(Any, registry)._collector_to_names
    return {family.name: collector for collector in collectors for family in collector.collect()}


def test_a_name_tells_whose_it_is() -> None:
    """What two services tell under one name can be added up; all else of a worker carries its prefix."""
    names = {service: set(instruments(service)) for service in GROUPS}
    assert names["gateway"] & names["worker"] == {"blockrelay_redis_errors"}
    assert names["scheduler"] & names["worker"] == {
        "blockrelay_redis_errors",
        "blockrelay_state",
        "blockrelay_state_transitions",
    }
    common = names["worker"] & (names["gateway"] | names["scheduler"])
    assert all(name.startswith("blockrelay_worker_") for name in names["worker"] - common)


@pytest.mark.parametrize("service", GROUPS)
def test_every_series_of_a_counter_is_there_before_its_first_event(service: str) -> None:
    """A rate over a series that begins with its first event does not see it."""
    by_stage = {"blockrelay_worker_fallbacks", "blockrelay_request_fallbacks"}  # once the blocks are known
    by_tier = {f"blockrelay_worker_page_store_{what}" for what in ("hits", "misses", "trouble")}
    for name, instrument in instruments(service).items():
        if isinstance(instrument, Counter) and name not in by_stage | by_tier:
            assert any(sample.value == 0 for family in instrument.collect() for sample in family.samples), name


def test_blocks_and_tiers_have_their_series_as_soon_as_they_are_known() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    metrics.expect_stage(1, "cpu", 3, 4)
    metrics.expect_tier("shm", ["full"])
    fallback = {"from": "GPU", "to": "CPU", "reason": "gpu_error"}
    for block in ("block_3", "block_4"):
        assert registry.get_sample_value("blockrelay_worker_fallbacks_total", {"block": block, **fallback}) == 0
        labels = {"block": block, "device": "cpu", "estimated": "false"}
        assert registry.get_sample_value("blockrelay_worker_block_latency_seconds_count", labels) == 0
    assert registry.get_sample_value("blockrelay_worker_page_store_trouble_total", {"tier": "shm", "kind": "full"}) == 0
    gateway = CollectorRegistry()
    GatewayMetrics(gateway, blocks=2)
    assert gateway.get_sample_value("blockrelay_request_fallbacks_total", {"block": "block_2", **fallback}) == 0


def test_cell_and_model_are_on_every_series_of_ours_and_on_no_other() -> None:
    metrics = WorkerMetrics(registry := service_registry("worker", cell="c7", model="m", numerics="w8a8/1"))
    metrics.commits.labels("OK").inc()
    text = generate_latest(registry).decode()
    assert sampled(text, "blockrelay_worker_commits_total", cell="c7", model="m", verdict="OK") == 1
    assert sampled(text, "blockrelay_build_info", cell="c7", numerics="w8a8/1", service="worker") == 1
    (memory,) = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "process_resident_memory_bytes"
    ]
    assert memory.labels == {}


def test_the_books_are_not_told_before_somebody_has_looked() -> None:
    """A counter that starts at 0 beside what other schedulers tell would read as a loss."""
    registry = CollectorRegistry()
    totals = Totals(registry)
    assert registry.get_sample_value("blockrelay_accepted_total") is None
    totals.set(Accounting(accepted=7, ended={"stop": 4}, in_flight=3, deaths=2, reruns={"death": 1}))
    assert registry.get_sample_value("blockrelay_accepted_total") == 7
    assert registry.get_sample_value("blockrelay_requests_in_flight") == 3
    assert registry.get_sample_value("blockrelay_ended_total", {"reason": "stop"}) == 4
    assert registry.get_sample_value("blockrelay_ended_total", {"reason": "error"}) == 0
    assert registry.get_sample_value("blockrelay_worker_deaths_total") == 2
    assert registry.get_sample_value("blockrelay_reruns_total", {"reason": "death"}) == 1
    assert registry.get_sample_value("blockrelay_reruns_total", {"reason": "drain"}) == 0


@pytest.mark.parametrize("service", GROUPS)
def test_every_metric_is_added_up_or_the_same_everywhere(service: str) -> None:
    """What speaks of the cell says so, and nothing else does."""
    registry = CollectorRegistry()
    GROUPS[service](registry)
    for family in registry.collect():
        if "of the cell" in family.documentation or "the cell has" in family.documentation or family.name in BOOKS:
            assert taken(family.name, family.type) == "max", family.name
        if family.name.startswith(("blockrelay_worker_", "blockrelay_gateway_")) and family.name not in BOOKS:
            assert taken(family.name, family.type) == "sum", family.name
        assert ("kept by Redis" in family.documentation) == (family.name in BOOKS), family.name
