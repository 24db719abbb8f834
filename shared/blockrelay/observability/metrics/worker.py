"""What a worker tells: its stage, its KV pages, its runs."""

from collections.abc import Iterable
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from blockrelay.observability.histograms import Histograms, ThreadCounter
from blockrelay.observability.metrics.devices import DeviceMetrics
from blockrelay.observability.metrics.instruments import (
    BLOCK_BUCKETS,
    REQUEST_BUCKETS,
    ROW_BUCKETS,
    STEP_BUCKETS,
    TTFT_BUCKETS,
    counter,
    expect_blocks,
    fallbacks,
    redis_errors,
)
from blockrelay.observability.states import States
from blockrelay.protocol.messages import Verdict
from blockrelay.protocol.plan import GPU

#: Why a GPU, or the process that owns it, is there no more.
DEVICE_LOSSES = (
    "process_ended",
    "hang",
    "device_removed",
    "device_lost",
    "illegal_access",
    "ecc_error",
    "unknown_twice",
    "canary",
    "unknown",
    "out_of_memory",
    "device_limit",
    "refused",
)


class WorkerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.states = States(registry)
        self.block_seconds = Histograms(
            "blockrelay_worker_block_latency_seconds",
            "How long one block took for one batch; estimated: as its share of the time of a GPU's stage",
            ("block", "device", "estimated"),
            buckets=BLOCK_BUCKETS,
            registry=registry,
        )
        self.stage_seconds = Histogram(
            "blockrelay_worker_stage_latency_seconds",
            "How long the stage took for one batch",
            ["stage", "device"],
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.commit_seconds = Histogram(
            "blockrelay_worker_commit_seconds",
            "How long COMMIT took until the control Redis answered; one call has what came meanwhile",
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.batch_rows = Histogram(
            "blockrelay_worker_iteration_tokens", "How many rows a batch had", buckets=ROW_BUCKETS, registry=registry
        )
        self.queue_wait = Histogram(
            "blockrelay_worker_request_queue_time_seconds",
            "How long from ACCEPT to CLAIM",
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self.prefill_time = Histogram(
            "blockrelay_worker_request_prefill_time_seconds",
            "How long from CLAIM to the first token of a run, at the first stage",
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )
        self.commits = counter(
            "blockrelay_worker_commits", "How many commits, by verdict", registry, verdict=get_args(Verdict)
        )
        self.fallbacks = fallbacks(
            "blockrelay_worker_fallbacks", "How many blocks moved to another device in mid-request", registry
        )
        self.device_losses = counter(
            "blockrelay_worker_device_losses", "How often its GPU was lost, by reason", registry, reason=DEVICE_LOSSES
        )
        self.device = DeviceMetrics(registry)
        self.running = Gauge(
            "blockrelay_worker_num_requests_running", "How many requests are on this worker", registry=registry
        )
        self.waiting = Gauge(
            "blockrelay_worker_num_requests_waiting", "How many of them have no rows to compute", registry=registry
        )
        self.kv_pages_used = Gauge("blockrelay_worker_kv_pages_used", "How many KV pages are in use", registry=registry)
        self.kv_pages_total = Gauge(
            "blockrelay_worker_kv_pages_total", "How many KV pages there are", registry=registry
        )
        self.kv_cache_usage = Gauge(
            "blockrelay_worker_kv_cache_usage_ratio", "Share of KV pages in use (0 to 1)", registry=registry
        )
        self.kv_pages_cached = Gauge(
            "blockrelay_worker_kv_pages_cached",
            "How many KV pages are kept for their name, without a user",
            registry=registry,
        )
        self.prefix_cache_queries = counter(
            "blockrelay_worker_prefix_cache_queries", "How many tokens were looked up in the page cache", registry
        )
        self.prefix_cache_hits = counter(
            "blockrelay_worker_prefix_cache_hits", "How many of them were found, in the pool or a tier", registry
        )
        self.prefix_cache_evictions = counter(
            "blockrelay_worker_prefix_cache_evictions",
            "How many cached KV pages of the pool gave way to others",
            registry,
        )
        self.page_store_hits = Counter(
            "blockrelay_worker_page_store_hits", "How many KV pages a tier gave, by tier", ["tier"], registry=registry
        )
        self.page_store_misses = Counter(
            "blockrelay_worker_page_store_misses",
            "How many KV pages a tier was asked for and did not have, by tier",
            ["tier"],
            registry=registry,
        )
        self.page_store_trouble = Counter(
            "blockrelay_worker_page_store_trouble",
            "How often a tier was full or unreachable or gave a corrupt page, by tier and kind",
            ["tier", "kind"],
            registry=registry,
        )
        self.page_store_dropped = counter(
            "blockrelay_worker_page_store_dropped",
            "How many KV pages were not written because too many waited or they were used anew",
            registry,
        )
        self.page_store_bytes = Gauge(
            "blockrelay_worker_page_store_bytes",
            "How many bytes a tier holds, as far as this worker knows, by tier",
            ["tier"],
            registry=registry,
        )
        self.generation_tokens = counter(
            "blockrelay_worker_generation_tokens", "How many tokens were sampled", registry
        )
        self.prompt_tokens = counter("blockrelay_worker_prompt_tokens", "How many prompt rows were computed", registry)
        self.preemptions = counter(
            "blockrelay_worker_num_preemptions", "How many runs gave their KV pages to older ones", registry
        )
        self.draft_tokens = counter(
            "blockrelay_worker_spec_decode_num_draft_tokens", "How many guessed tokens were verified", registry
        )
        self.accepted_tokens = counter(
            "blockrelay_worker_spec_decode_num_accepted_tokens", "How many of them were right", registry
        )
        self.busy_seconds = counter(
            "blockrelay_worker_stage_busy_seconds", "How long the stage computed and passed on results", registry
        )
        self.idle_seconds = counter(
            "blockrelay_worker_stage_idle_seconds",
            "How long requests were on this worker and none had rows to compute: bubbles",
            registry,
        )
        self.inference_seconds = ThreadCounter(
            "blockrelay_worker_inference_seconds", "How long blocks computed batches", registry=registry
        )
        self.inferences = ThreadCounter(
            "blockrelay_worker_inferences", "How many batches the stage computed", registry=registry
        )
        self.token_generation_seconds = ThreadCounter(
            "blockrelay_worker_token_generation_seconds",
            "How long logits were turned into tokens and these prepared for COMMIT",
            registry=registry,
        )
        self.state_transfer_seconds = ThreadCounter(
            "blockrelay_worker_state_transfer_seconds",
            "How long rows were packed for the next stage and sent",
            registry=registry,
        )
        self.cache_management_seconds = ThreadCounter(
            "blockrelay_worker_cache_management_seconds",
            "How long KV pages were looked for, given to requests, named and taken back",
            registry=registry,
        )
        self.forwarded = counter(
            "blockrelay_worker_forwarded_bytes",
            "How many bytes of rows, or of tensors by name, went to the next stage, by way",
            registry,
            way=("local", "redis"),
        )
        self.load_seconds = Gauge(
            "blockrelay_worker_block_load_seconds", "How long loading and checking the stage took", registry=registry
        )
        self.redis_errors = redis_errors(registry)

    def expect_stage(self, stage: int, device: str, first: int, last: int) -> None:
        """This worker is going to run the blocks `first` to `last`: their series begin."""
        blocks = [f"block_{block}" for block in range(first, last + 1)]
        for estimated in ("false", "true") if device == GPU else ("false",):
            self.block_seconds.expect(blocks, device, estimated)
        self.stage_seconds.labels(stage, device)
        expect_blocks(self.fallbacks, first, last)

    def expect_tier(self, tier: str, kinds: Iterable[str]) -> None:
        """It has this tier of a page store, with these kinds of trouble: their series begin."""
        self.page_store_hits.labels(tier)
        self.page_store_misses.labels(tier)
        for kind in kinds:
            self.page_store_trouble.labels(tier, kind)
