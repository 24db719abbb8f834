"""The metrics registry of a service, with what every service reports besides the instruments of its group."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, GCCollector, Info, Metric, PlatformCollector, ProcessCollector
from prometheus_client.metrics import disable_created_metrics

from blockrelay import __version__
from blockrelay.protocol.number import PROTOCOL

_OURS, _WORKERS = "blockrelay_", "blockrelay_worker_"
#: What release 0.1.0 called the instruments of a worker: as now, without `worker_`. They are told under both names in
#: the release after it, and under the new one alone in the next.
_RENAMED_SINCE_0_1 = frozenset(
    _WORKERS + name
    for name in (
        "block_latency_seconds", "block_load_seconds", "cache_management_seconds", "commits", "fallbacks",
        "forwarded_bytes", "generation_tokens", "inference_seconds", "inferences", "iteration_tokens",
        "kv_cache_usage_perc", "kv_pages_cached", "kv_pages_total", "kv_pages_used", "num_preemptions",
        "num_requests_running", "num_requests_waiting", "page_store_bytes", "page_store_dropped", "page_store_hits",
        "page_store_misses", "page_store_trouble", "prefix_cache_evictions", "prefix_cache_hits",
        "prefix_cache_queries", "prompt_tokens", "request_queue_time_seconds", "spec_decode_num_accepted_tokens",
        "spec_decode_num_draft_tokens", "stage_busy_seconds", "stage_idle_seconds", "stage_latency_seconds",
        "state_transfer_seconds", "token_generation_seconds",
    )
)  # fmt: skip
#: Names that misled -> told for this release beside their successors, with the same labels.
DEPRECATED = {
    "blockrelay_request_success": "blockrelay_finished_requests",
    "blockrelay_kv_cache_usage_perc": "blockrelay_kv_cache_usage_ratio",
    "blockrelay_worker_kv_cache_usage_perc": "blockrelay_worker_kv_cache_usage_ratio",
}
_BEFORE = {new: old for old, new in DEPRECATED.items()}


class ServiceRegistry(CollectorRegistry):
    """A registry whose series of ours all carry the same labels, `labels`, beside their own.

    What had another name is told under that too: in release 0.1.0 that of a worker, without these labels, as it was.
    """

    def __init__(self, labels: dict[str, str]) -> None:
        super().__init__()
        self._labels, self._facts = labels, dict[str, str]()
        self._build = Info(
            "blockrelay_build", "The release of this service and the protocol that it speaks", registry=self
        )

    def tell_build(self, **facts: str) -> None:
        """What `blockrelay_build_info` says from now on, beside what it has said."""
        self._facts |= facts
        self._build.info(self._facts)

    def collect(self) -> Iterable[Metric]:
        """All metrics, freshly read."""
        for family in super().collect():
            if not family.name.startswith(_OURS):
                yield family
                continue
            before = _BEFORE.get(family.name)
            for told in (family, _called(family, before)) if before else (family,):
                if told.name in _RENAMED_SINCE_0_1:
                    yield _under_its_old_name(told)
                told.samples = [sample._replace(labels={**self._labels, **sample.labels}) for sample in told.samples]
                yield told


class Together(CollectorRegistry):
    """What several registries tell, each family once: a gateway has one for each of its cells."""

    def __init__(self, of: Iterable[CollectorRegistry]) -> None:
        super().__init__()
        self._of = list(of)

    def collect(self) -> Iterable[Metric]:
        """All metrics, freshly read."""
        families: dict[str, Metric] = {}
        for registry in self._of:
            for family in registry.collect():
                families.setdefault(family.name, family)
                if families[family.name] is not family:
                    families[family.name].samples.extend(family.samples)
        return families.values()


def _called(family: Metric, old: str) -> Metric:
    """A family under the name that it had, as long as nothing has changed its samples."""
    made = Metric(old, f"Deprecated, gone with the next release: {family.name} tells the same", family.type)
    made.samples = [sample._replace(name=sample.name.replace(family.name, old, 1)) for sample in family.samples]
    return made


def _under_its_old_name(family: Metric) -> Metric:
    old = Metric(family.name.replace(_WORKERS, _OURS, 1), f"Old name of {family.name}", family.type)
    old.samples = [sample._replace(name=sample.name.replace(_WORKERS, _OURS, 1)) for sample in family.samples]
    return old


def service_registry(service: str, *, cell: str, model: str, numerics: str = "") -> ServiceRegistry:
    """A registry with `process_*` (memory, CPU seconds, open files, start), `python_*` and `blockrelay_build_info`.

    `model` is its name, as clients call it; `numerics` the id of a worker. Switches the `_created` series off for the
    whole process: they double the number of series and say little more than `process_start_time_seconds`.
    """
    disable_created_metrics()
    registry = ServiceRegistry({"cell": cell, "model": model})
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    registry.tell_build(service=service, version=__version__, protocol=str(PROTOCOL))
    if numerics:
        registry.tell_build(numerics=numerics)
    return registry
