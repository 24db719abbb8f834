"""Every Prometheus instrument. Names follow vLLM's semantics under the prefix `blockrelay_`; units are in the names.

A service builds its one group at start; the group's attribute is the only handle on an instrument. Where gateway and
worker share a name (tokens, running, waiting), the gateway counts what clients asked for and got and the worker what it
computed, re-runs included: do not add them up.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from blockrelay.observability.histograms import Histograms, ThreadCounter
from blockrelay.observability.states import States

#: vLLM's buckets for time to first token, and finer ones for a step and a block. Seconds.
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
STEP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
BLOCK_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class GatewayMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "blockrelay_request_success", "How many requests ended, by reason", ["finished_reason"], registry=registry
        )
        self.rejections = Counter(
            "blockrelay_admission_rejections",
            "How many requests were refused, by HTTP status",
            ["status"],
            registry=registry,
        )
        self.limited = Counter(
            "blockrelay_admission_limited",
            "How many of them were refused by a limit: tokens_per_minute, concurrency (of the client), in_flight, "
            "kv_pages, wait, deadline, redis_memory, result_bytes, connections, bodies (ours)",
            ["limit"],
            registry=registry,
        )
        self.running = Gauge(
            "blockrelay_num_requests_running",
            "How many requests this gateway follows that have a token",
            registry=registry,
        )
        self.waiting = Gauge(
            "blockrelay_num_requests_waiting",
            "How many requests this gateway follows without a token",
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "blockrelay_prompt_tokens", "How many prompt tokens were accepted", registry=registry
        )
        self.generation_tokens = Counter(
            "blockrelay_generation_tokens", "How many tokens were relayed", registry=registry
        )
        self.time_to_first_token = Histogram(
            "blockrelay_time_to_first_token_seconds",
            "How long from ACCEPT to token 1",
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self.inter_token_latency = Histogram(
            "blockrelay_inter_token_latency_seconds",
            "How long between two tokens",
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.e2e_latency = Histogram(
            "blockrelay_e2e_request_latency_seconds",
            "How long from ACCEPT to the end",
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self.disconnected = Counter(
            "blockrelay_disconnected_clients", "How many clients went away early", registry=registry
        )
        self.fallbacks = Counter(
            "blockrelay_request_fallbacks",
            "How many fallbacks ended requests report (workers count blockrelay_fallbacks as they happen)",
            ["block", "from", "to", "reason"],
            registry=registry,
        )
        self.forgotten = Counter(
            "blockrelay_ended_requests_forgotten",
            "How many ended requests were forgotten before their retention was over, because memory was short",
            registry=registry,
        )
        self.redis_errors = _redis_errors(registry)


class SchedulerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.workers = Gauge(
            "blockrelay_workers", "How many workers, by device and state", ["device", "state"], registry=registry
        )
        self.states = States(registry)
        self.plan_epoch = Gauge("blockrelay_plan_epoch", "Which plan is in force", registry=registry)
        self.stage_workers = Gauge(
            "blockrelay_stage_workers",
            "How many ready workers each stage of the plan has, by its blocks and their device",
            ["stage", "blocks", "device"],
            registry=registry,
        )
        self.deaths = Counter("blockrelay_worker_deaths", "How many workers were declared dead", registry=registry)
        self.reruns = _reruns(registry)
        self.in_flight = Gauge(
            "blockrelay_requests_in_flight", "How many requests are accepted and unfinished", registry=registry
        )
        self.ended = Gauge(
            "blockrelay_ended_requests", "How many requests have ended and can still be read", registry=registry
        )
        self.queue_depth = Gauge(
            "blockrelay_queue_depth", "How many jobs wait, by stream", ["stream"], registry=registry
        )
        self.without_numerics = Gauge(
            "blockrelay_requests_without_numerics",
            "How many re-runs wait for a worker of their numerics id while none is left",
            registry=registry,
        )
        self.redis_errors = _redis_errors(registry)


class WorkerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.states = States(registry)
        self.block_seconds = Histograms(
            "blockrelay_block_latency_seconds",
            "How long one block took for one batch",
            ("block", "device"),
            buckets=BLOCK_BUCKETS,
            registry=registry,
        )
        self.stage_seconds = Histogram(
            "blockrelay_stage_latency_seconds",
            "How long the stage took for one batch",
            ["stage", "device"],
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.batch_rows = Histogram(
            "blockrelay_iteration_tokens", "How many rows a batch had", buckets=ROW_BUCKETS, registry=registry
        )
        self.queue_wait = Histogram(
            "blockrelay_request_queue_time_seconds",
            "How long from ACCEPT to CLAIM",
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self.commits = Counter("blockrelay_commits", "How many commits, by verdict", ["verdict"], registry=registry)
        self.reruns = _reruns(registry)
        self.fallbacks = Counter(
            "blockrelay_fallbacks",
            "How many blocks moved to another device in mid-request",
            ["block", "from", "to", "reason"],
            registry=registry,
        )
        self.running = Gauge(
            "blockrelay_num_requests_running", "How many requests are on this worker", registry=registry
        )
        self.waiting = Gauge(
            "blockrelay_num_requests_waiting", "How many of them have no rows to compute", registry=registry
        )
        self.kv_pages_used = Gauge("blockrelay_kv_pages_used", "How many KV pages are in use", registry=registry)
        self.kv_pages_total = Gauge("blockrelay_kv_pages_total", "How many KV pages there are", registry=registry)
        self.kv_cache_usage = Gauge(
            "blockrelay_kv_cache_usage_perc", "Share of KV pages in use (0 to 1)", registry=registry
        )
        self.kv_pages_cached = Gauge(
            "blockrelay_kv_pages_cached", "How many KV pages are kept for their name, without a user", registry=registry
        )
        self.prefix_cache_queries = Counter(
            "blockrelay_prefix_cache_queries", "How many tokens were looked up in the page cache", registry=registry
        )
        self.prefix_cache_hits = Counter(
            "blockrelay_prefix_cache_hits", "How many of them were found, in the pool or a tier", registry=registry
        )
        self.prefix_cache_evictions = Counter(
            "blockrelay_prefix_cache_evictions",
            "How many cached KV pages of the pool gave way to others",
            registry=registry,
        )
        self.page_store_hits = Counter(
            "blockrelay_page_store_hits", "How many KV pages a tier gave, by tier", ["tier"], registry=registry
        )
        self.page_store_misses = Counter(
            "blockrelay_page_store_misses",
            "How many KV pages a tier was asked for and did not have, by tier",
            ["tier"],
            registry=registry,
        )
        self.page_store_trouble = Counter(
            "blockrelay_page_store_trouble",
            "How often a tier was full or unreachable or gave a corrupt page, by tier and kind",
            ["tier", "kind"],
            registry=registry,
        )
        self.page_store_dropped = Counter(
            "blockrelay_page_store_dropped",
            "How many KV pages were not written because too many waited or they were used anew",
            registry=registry,
        )
        self.page_store_bytes = Gauge(
            "blockrelay_page_store_bytes",
            "How many bytes a tier holds, as far as this worker knows, by tier",
            ["tier"],
            registry=registry,
        )
        self.generation_tokens = Counter(
            "blockrelay_generation_tokens", "How many tokens were sampled", registry=registry
        )
        self.prompt_tokens = Counter(
            "blockrelay_prompt_tokens", "How many prompt rows were computed", registry=registry
        )
        self.preemptions = Counter(
            "blockrelay_num_preemptions", "How many runs gave their KV pages to older ones", registry=registry
        )
        self.draft_tokens = Counter(
            "blockrelay_spec_decode_num_draft_tokens", "How many guessed tokens were verified", registry=registry
        )
        self.accepted_tokens = Counter(
            "blockrelay_spec_decode_num_accepted_tokens", "How many of them were right", registry=registry
        )
        self.busy_seconds = Counter(
            "blockrelay_stage_busy_seconds", "How long the stage computed and passed on results", registry=registry
        )
        self.idle_seconds = Counter(
            "blockrelay_stage_idle_seconds",
            "How long requests were on this worker and none had rows to compute: bubbles",
            registry=registry,
        )
        self.inference_seconds = ThreadCounter(
            "blockrelay_inference_seconds", "How long blocks computed batches", registry=registry
        )
        self.inferences = ThreadCounter(
            "blockrelay_inferences", "How many batches the stage computed", registry=registry
        )
        self.token_generation_seconds = ThreadCounter(
            "blockrelay_token_generation_seconds",
            "How long logits were turned into tokens and these prepared for COMMIT",
            registry=registry,
        )
        self.state_transfer_seconds = ThreadCounter(
            "blockrelay_state_transfer_seconds",
            "How long rows were packed for the next stage and sent",
            registry=registry,
        )
        self.cache_management_seconds = ThreadCounter(
            "blockrelay_cache_management_seconds",
            "How long KV pages were looked for, given to requests, named and taken back",
            registry=registry,
        )
        self.forwarded = Counter(
            "blockrelay_forwarded_bytes", "How many bytes of rows went to the next stage", registry=registry
        )
        self.load_seconds = Gauge(
            "blockrelay_block_load_seconds", "How long loading and checking the stage took", registry=registry
        )
        self.redis_errors = _redis_errors(registry)


def _reruns(registry: CollectorRegistry) -> Counter:
    return Counter(
        "blockrelay_reruns", "How many runs were ended and queued again, by reason", ["reason"], registry=registry
    )


def _redis_errors(registry: CollectorRegistry) -> Counter:
    return Counter("blockrelay_redis_errors", "How often Redis could not be reached", registry=registry)
