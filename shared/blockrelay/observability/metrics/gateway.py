"""What a gateway tells: its requests, its answers, and the gauges of its cell that inference gateways read."""

from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Gauge, Histogram

from blockrelay.observability.metrics.instruments import (
    LENGTH_BUCKETS,
    REQUEST_BUCKETS,
    STEP_BUCKETS,
    TTFT_BUCKETS,
    counter,
    expect_blocks,
    fallbacks,
    redis_errors,
)
from blockrelay.protocol.messages import EndReason

#: What may refuse a new request, of the client and of ours.
CLIENT_LIMITS = ("tokens_per_minute", "concurrency")
CELL_LIMITS = ("in_flight", "kv_pages", "wait", "deadline", "redis_memory", "connections", "bodies")
#: A limit of both.
SHARED_LIMIT = "result_bytes"
LIMITS = (*CLIENT_LIMITS, SHARED_LIMIT, *CELL_LIMITS)
#: Routes of new requests.
NEW_REQUESTS = ("/v1/completions", "/v1/chat/completions", "/v1/infer")
#: Where steps of a session are asked for by WebSocket.
SOCKET = "/v1/infer/ws"
#: Why a new request is refused: what is wrong with it, what of ours fails, a limit.
REFUSALS = (
    *("malformed", "too_long", "unauthorized", "not_found", "conflict", "slow_client"),
    *("expired", "cancelled", "redis", "unavailable", "failed"),
    *LIMITS,
)
#: HTTP statuses of refused new requests (`blockrelay_gateway.http.errors`).
STATUSES = ("400", "401", "403", "404", "408", "409", "413", "421", "422", "429", "499", "500", "503", "504")
#: Fields of OpenAI's requests that change nothing here (`blockrelay_gateway.api.openai.strictness`).
IGNORED_FIELDS = (
    *("client_metadata", "messages", "metadata", "moderation", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "reasoning_effort", "safety_identifier", "service_tier", "store", "stream_options"),
    *("user", "verbosity"),
)
#: What `/readyz` can be asked.
Question = Literal["tokens", "accepting"]


class GatewayMetrics:
    def __init__(self, registry: CollectorRegistry, *, blocks: int = 0) -> None:
        """`blocks`: of the model."""
        self.registry = registry
        self.requests = counter(
            "blockrelay_finished_requests",
            "How many requests ended, by reason",
            registry,
            finished_reason=get_args(EndReason),
        )
        self.rejections = counter(
            "blockrelay_admission_rejections",
            "How many requests were refused, by HTTP status",
            registry,
            status=STATUSES,
        )
        self.refused = counter(
            "blockrelay_refused_requests",
            "How many requests were refused, by route and reason: the limit, or the kind of error",
            registry,
            route=(*NEW_REQUESTS, SOCKET),
            reason=REFUSALS,
        )
        self.ignored_fields = counter(
            "blockrelay_ignored_fields",
            "How many requests had a field that changes nothing here",
            registry,
            field=IGNORED_FIELDS,
        )
        self.limited = counter(
            "blockrelay_admission_limited",
            f"How many of them were refused by a limit: {', '.join(CLIENT_LIMITS)} (of the client), "
            f"{', '.join(CELL_LIMITS)} (ours), {SHARED_LIMIT} (both)",
            registry,
            limit=LIMITS,
        )
        self.prompt_tokens = counter("blockrelay_prompt_tokens", "How many prompt tokens were accepted", registry)
        self.generation_tokens = counter("blockrelay_generation_tokens", "How many tokens were relayed", registry)
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
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )
        self.decode_time = Histogram(
            "blockrelay_request_decode_time_seconds",
            "How long from token 1 to the end",
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )
        self.prompt_length = Histogram(
            "blockrelay_request_prompt_tokens",
            "How many tokens the prompt of an ended request had",
            buckets=LENGTH_BUCKETS,
            registry=registry,
        )
        self.answer_length = Histogram(
            "blockrelay_request_generation_tokens",
            "How many tokens an ended request got",
            buckets=LENGTH_BUCKETS,
            registry=registry,
        )
        self.disconnected = counter("blockrelay_disconnected_clients", "How many clients went away early", registry)
        self.fallbacks = fallbacks(
            "blockrelay_request_fallbacks",
            "How many fallbacks ended requests report (workers count blockrelay_worker_fallbacks as they happen)",
            registry,
        )
        expect_blocks(self.fallbacks, 1, blocks)
        self.forgotten = counter(
            "blockrelay_ended_requests_forgotten",
            "How many ended requests were forgotten before their retention was over, because memory was short",
            registry,
        )
        self.followed_running = Gauge(
            "blockrelay_gateway_requests_running",
            "How many requests this gateway follows that have a token",
            registry=registry,
        )
        self.followed_waiting = Gauge(
            "blockrelay_gateway_requests_waiting",
            "How many requests this gateway follows without a token",
            registry=registry,
        )
        self.running = Gauge(
            "blockrelay_num_requests_running", "How many requests of the cell are on workers", registry=registry
        )
        self.waiting = Gauge(
            "blockrelay_num_requests_waiting", "How many requests of the cell wait for a worker", registry=registry
        )
        self.kv_cache_usage = Gauge(
            "blockrelay_kv_cache_usage_ratio",
            "Share of KV pages in use (0 to 1), in the stage of the cell that has least left",
            registry=registry,
        )
        self.ready = Gauge(
            "blockrelay_ready",
            "Whether `/readyz` would say yes (1) or not (0), by what it is asked",
            ["question"],
            registry=registry,
        )
        for question in get_args(Question):
            self.ready.labels(question)
        self.cell_list_version = Gauge(
            "blockrelay_cell_list_version",
            "Version of the list of cells that is in force at this gateway, 0 without one",
            registry=registry,
        )
        self.api_keys = Gauge(
            "blockrelay_gateway_api_keys", "How many API keys are in force at this gateway, 0 without a file of them",
            registry=registry,
        )  # fmt: skip
        self.api_keys_read_at = Gauge(
            "blockrelay_gateway_api_keys_loaded_timestamp_seconds",
            "When this gateway read the API keys that are in force (Unix time), 0 without a file of them",
            registry=registry,
        )
        self.api_keys_unreadable = Gauge(
            "blockrelay_gateway_api_keys_unreadable",
            "Whether the file of API keys cannot be used as it is now (1), so that those read before stay in force",
            registry=registry,
        )
        self.redis_errors = redis_errors(registry)

    def tell_keys(self, count: int, read_at: float, *, unreadable: bool) -> None:
        """What a gateway knows of its file of API keys."""
        self.api_keys.set(count)
        self.api_keys_read_at.set(read_at)
        self.api_keys_unreadable.set(unreadable)
