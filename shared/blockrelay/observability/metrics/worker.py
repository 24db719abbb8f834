"""Metrics of a worker: its stage, its KV pages, its runs."""

from collections.abc import Iterable
from typing import Literal, get_args

from prometheus_client import CollectorRegistry

from blockrelay.observability.histograms import Histograms
from blockrelay.observability.metrics.devices import DeviceMetrics
from blockrelay.observability.metrics.instruments import (
    BLOCK_BUCKETS,
    REQUEST_BUCKETS,
    ROW_BUCKETS,
    STEP_BUCKETS,
    TTFT_BUCKETS,
    Instruments,
    expect_blocks,
    redis_errors,
)
from blockrelay.observability.states import States
from blockrelay.protocol.messages import Verdict
from blockrelay.protocol.plan import GPU

#: A direction in which KV pages of preempted runs move, seen from the worker.
Swap = Literal["out", "in"]
#: Why a GPU, or the process that owns it, was lost.
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
    "rank_ended",
)


class WorkerMetrics:
    """Metrics of a worker, its GPU's included."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        make = Instruments(registry)
        self.states = States(registry)
        self.block_seconds = Histograms(
            "blockrelay_worker_block_latency_seconds",
            "Time of one block for one batch; estimated is true if it is a share of the measured time of a GPU's stage",
            ("block", "device", "estimated"),
            buckets=BLOCK_BUCKETS,
            registry=registry,
        )
        self.stage_seconds = make.histogram(
            "blockrelay_worker_stage_latency_seconds",
            "Time of the stage for one batch",
            STEP_BUCKETS,
            "stage",
            "device",
        )
        self.commit_seconds = make.histogram(
            "blockrelay_worker_commit_seconds",
            "Time of a COMMIT call until the control Redis answered; one call has the commits of several requests",
            STEP_BUCKETS,
        )
        self.batch_rows = make.histogram("blockrelay_worker_iteration_tokens", "Tokens in each batch", ROW_BUCKETS)
        self.queue_wait = make.histogram(
            "blockrelay_worker_request_queue_time_seconds",
            "Time from the acceptance of a request to its claim by this worker",
            TTFT_BUCKETS,
        )
        self.prefill_time = make.histogram(
            "blockrelay_worker_request_prefill_time_seconds",
            "Time from the claim of a run to its first token, measured by the first stage",
            REQUEST_BUCKETS,
        )
        self.commits = make.counter("blockrelay_worker_commits", "Commits, by verdict", verdict=get_args(Verdict))
        self.fallbacks = make.fallbacks(
            "blockrelay_worker_fallbacks", "Moves of a block to another device in mid-request"
        )
        self.device_losses = make.counter(
            "blockrelay_worker_device_losses",
            "Losses of the worker's GPU, or of a rank, by reason",
            reason=DEVICE_LOSSES,
        )
        self.device = DeviceMetrics(registry)
        self.running = make.gauge("blockrelay_worker_num_requests_running", "Requests on this worker")
        self.waiting = make.gauge(
            "blockrelay_worker_num_requests_waiting", "Requests on this worker without tokens to compute now"
        )
        self.kv_pages_used = make.gauge("blockrelay_worker_kv_pages_used", "KV pages in use")
        self.kv_pages_total = make.gauge("blockrelay_worker_kv_pages_total", "KV pages of this worker, in use or not")
        self.kv_cache_usage = make.gauge("blockrelay_worker_kv_cache_usage_ratio", "Share of KV pages in use (0 to 1)")
        self.kv_pages_cached = make.gauge(
            "blockrelay_worker_kv_pages_cached", "KV pages that no run uses and the prefix cache keeps"
        )
        self.prefix_cache_queries = make.counter(
            "blockrelay_worker_prefix_cache_queries", "Tokens that were looked up in the prefix cache"
        )
        self.prefix_cache_hits = make.counter(
            "blockrelay_worker_prefix_cache_hits",
            "Tokens that were found in the prefix cache: in the pool or in a tier of the page store",
        )
        self.prefix_cache_evictions = make.counter(
            "blockrelay_worker_prefix_cache_evictions", "Cached KV pages of the pool that were evicted for others"
        )
        self.page_store_hits = make.counter(
            "blockrelay_worker_page_store_hits", "KV pages read from the page store, by tier", "tier"
        )
        self.page_store_misses = make.counter(
            "blockrelay_worker_page_store_misses",
            "KV pages that were asked of the page store and not found, by tier",
            "tier",
        )
        self.page_store_trouble = make.counter(
            "blockrelay_worker_page_store_trouble",
            "Times that a tier of the page store was full or unreachable or gave a corrupt page, by tier and kind",
            "tier",
            "kind",
        )
        self.page_store_dropped = make.counter(
            "blockrelay_worker_page_store_dropped",
            "KV pages not written to the page store: too many waited, they were reused before, or could not be copied",
        )
        self.page_store_bytes = make.gauge(
            "blockrelay_worker_page_store_bytes",
            "Bytes in the page store, as far as this worker knows, by tier",
            "tier",
        )
        self._swapped = (
            make.counter(
                "blockrelay_worker_swapped_pages",
                "KV pages of runs that were preempted or run again: held in the page store (out), read from it (in)",
                direction=get_args(Swap),
            ),
            make.counter(
                "blockrelay_worker_swapped_bytes",
                "Bytes of KV pages of runs that were preempted or run again: held in the page store (out), read (in)",
                direction=get_args(Swap),
            ),
            make.counter(
                "blockrelay_worker_swap_seconds",
                "Time of holding (out) and reading (in) KV pages of runs that were preempted or run again",
                direction=get_args(Swap),
            ),
        )
        self.generation_tokens = make.counter("blockrelay_worker_generation_tokens", "Tokens that this worker sampled")
        self.prompt_tokens = make.counter(
            "blockrelay_worker_prompt_tokens", "Prompt tokens that this worker computed as first stage"
        )
        self.preemptions = make.counter(
            "blockrelay_worker_num_preemptions", "Runs that had to give their KV pages to older ones"
        )
        self.draft_tokens = make.counter(
            "blockrelay_worker_spec_decode_num_draft_tokens", "Draft tokens that were verified"
        )
        self.accepted_tokens = make.counter(
            "blockrelay_worker_spec_decode_num_accepted_tokens", "Draft tokens that were right"
        )
        self.draft_model_tokens = make.counter(
            "blockrelay_worker_draft_model_tokens", "Draft tokens that the draft model guessed, as first stage"
        )
        self.draft_model_accepted_tokens = make.counter(
            "blockrelay_worker_draft_model_accepted_tokens", "Draft tokens of the draft model that were right"
        )
        self.busy_seconds = make.counter(
            "blockrelay_worker_stage_busy_seconds", "Time in which the stage computed and passed on results"
        )
        self.idle_seconds = make.counter(
            "blockrelay_worker_stage_idle_seconds",
            "Time in which requests were on this worker and none had tokens to compute (pipeline bubbles)",
        )
        self.inference_seconds = make.thread_counter(
            "blockrelay_worker_inference_seconds", "Time in which the stage computed batches"
        )
        self.inferences = make.thread_counter("blockrelay_worker_inferences", "Batches that the stage computed")
        self.token_generation_seconds = make.thread_counter(
            "blockrelay_worker_token_generation_seconds",
            "Time of turning logits into tokens and preparing these for COMMIT",
        )
        self.state_transfer_seconds = make.thread_counter(
            "blockrelay_worker_state_transfer_seconds",
            "Time of packing hidden states for the next stage and sending them",
        )
        self.cache_management_seconds = make.thread_counter(
            "blockrelay_worker_cache_management_seconds",
            "Time of the bookkeeping for KV pages: look-up, allocation, publishing and release",
        )
        self.forwarded = make.counter(
            "blockrelay_worker_forwarded_bytes",
            "Bytes of hidden states or named tensors sent to the next stage, by way",
            way=("local", "redis"),
        )
        self.load_seconds = make.gauge("blockrelay_worker_block_load_seconds", "Time of loading and checking the stage")
        self.redis_errors = redis_errors(registry)

    def expect_stage(self, stage: int, device: str, first: int, last: int) -> None:
        """Creates the series of `stage`, its blocks `first` to `last` (both included) and its `device`, at 0.

        `device` is the class of the device, CPU or GPU of `protocol.plan`.
        """
        blocks = [f"block_{block}" for block in range(first, last + 1)]
        for estimated in ("false", "true") if device == GPU else ("false",):
            self.block_seconds.expect(blocks, device, estimated)
        self.stage_seconds.labels(stage, device)
        expect_blocks(self.fallbacks, first, last)

    def swapped(self, direction: Swap, pages: int, size: int, seconds: float) -> None:
        """Counts KV pages of preempted runs, `size` bytes: held in the page store (out), or read from it (in)."""
        for counter, value in zip(self._swapped, (pages, size, seconds), strict=True):
            counter.labels(direction).inc(value)

    def expect_tier(self, tier: str, kinds: Iterable[str]) -> None:
        """Creates the series of a tier of the page store and of `kinds` of trouble with it, at 0."""
        self.page_store_hits.labels(tier)
        self.page_store_misses.labels(tier)
        for kind in kinds:
            self.page_store_trouble.labels(tier, kind)
