"""Metrics of a gateway: its requests, its answers, and gauges of its cell that a Kubernetes gateway balances by."""

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

#: Limits that may refuse a new request: those of one client, and those of the gateway or the cell.
CLIENT_LIMITS = ("tokens_per_minute", "concurrency")
CELL_LIMITS = ("in_flight", "kv_pages", "wait", "deadline", "redis_memory", "connections", "bodies")
#: A limit that a client and the gateway both have.
SHARED_LIMIT = "result_bytes"
LIMITS = (*CLIENT_LIMITS, SHARED_LIMIT, *CELL_LIMITS)
#: Routes of new requests.
NEW_REQUESTS = ("/v1/completions", "/v1/chat/completions", "/v1/infer")
#: The route of the WebSocket over which a client sends the steps of a session.
SOCKET = "/v1/infer/ws"
#: Why a new request is refused: a fault in the request, a failure on our side, or a limit.
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
#: The two checks of `/readyz`: can requests be computed now, and are requests accepted.
Question = Literal["tokens", "accepting"]


class GatewayMetrics:
    """Metrics of a gateway for one cell."""

    def __init__(self, registry: CollectorRegistry, *, blocks: int = 0) -> None:
        """`blocks`: the model's number of blocks, for the series of fallbacks."""
        self.registry = registry
        self.requests = counter(
            "blockrelay_finished_requests",
            "Requests that ended, by reason",
            registry,
            finished_reason=get_args(EndReason),
        )
        self.rejections = counter(
            "blockrelay_admission_rejections",
            "New requests that were refused, by HTTP status",
            registry,
            status=STATUSES,
        )
        self.refused = counter(
            "blockrelay_refused_requests",
            "New requests that were refused, by route and reason: the limit, or the kind of error",
            registry,
            route=(*NEW_REQUESTS, SOCKET),
            reason=REFUSALS,
        )
        self.ignored_fields = counter(
            "blockrelay_ignored_fields",
            "Requests with a field that is accepted and has no effect, by field",
            registry,
            field=IGNORED_FIELDS,
        )
        self.limited = counter(
            "blockrelay_admission_limited",
            f"New requests that a limit refused, by limit: {', '.join(CLIENT_LIMITS)} (of the client), "
            f"{', '.join(CELL_LIMITS)} (ours), {SHARED_LIMIT} (both)",
            registry,
            limit=LIMITS,
        )
        self.prompt_tokens = counter("blockrelay_prompt_tokens", "Prompt tokens of accepted requests", registry)
        self.generation_tokens = counter(
            "blockrelay_generation_tokens", "Generated tokens of requests that this gateway accepted", registry
        )
        self.time_to_first_token = Histogram(
            "blockrelay_time_to_first_token_seconds",
            "Time from the acceptance of a request to its first token",
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self.inter_token_latency = Histogram(
            "blockrelay_inter_token_latency_seconds",
            "Time between two tokens of a request",
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.e2e_latency = Histogram(
            "blockrelay_e2e_request_latency_seconds",
            "Time from the acceptance of a request to its end",
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )
        self.decode_time = Histogram(
            "blockrelay_request_decode_time_seconds",
            "Time from the first token of a request to its end",
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )
        self.prompt_length = Histogram(
            "blockrelay_request_prompt_tokens",
            "Prompt tokens of each request that ended",
            buckets=LENGTH_BUCKETS,
            registry=registry,
        )
        self.answer_length = Histogram(
            "blockrelay_request_generation_tokens",
            "Generated tokens of each request that ended",
            buckets=LENGTH_BUCKETS,
            registry=registry,
        )
        self.disconnected = counter(
            "blockrelay_disconnected_clients", "Requests whose last client disconnected before the end", registry
        )
        self.fallbacks = fallbacks(
            "blockrelay_request_fallbacks",
            "Fallbacks reported by ended requests (workers count blockrelay_worker_fallbacks as they happen)",
            registry,
        )
        expect_blocks(self.fallbacks, 1, blocks)
        self.forgotten = counter(
            "blockrelay_ended_requests_forgotten",
            "Ended requests that were deleted before their retention was over, because memory was short",
            registry,
        )
        self.running_requests = Gauge(
            "blockrelay_gateway_requests_running",
            "Requests whose tokens this gateway reads and that have at least one token",
            registry=registry,
        )
        self.waiting_requests = Gauge(
            "blockrelay_gateway_requests_waiting",
            "Requests whose tokens this gateway reads and that have no token yet",
            registry=registry,
        )
        self.running = Gauge(
            "blockrelay_num_requests_running", "Requests of the cell that are on workers", registry=registry
        )
        self.waiting = Gauge(
            "blockrelay_num_requests_waiting", "Requests of the cell that wait for a worker", registry=registry
        )
        self.kv_cache_usage = Gauge(
            "blockrelay_kv_cache_usage_ratio",
            "Share of KV pages in use (0 to 1), in the stage of the cell that has the fewest left",
            registry=registry,
        )
        self.ready = Gauge(
            "blockrelay_ready",
            "1 if `/readyz` would answer that the gateway is ready, else 0, by question",
            ["question"],
            registry=registry,
        )
        for question in get_args(Question):
            self.ready.labels(question)
        self.cell_list_version = Gauge(
            "blockrelay_cell_list_version",
            "Version of the list of cells that this gateway uses, 0 without one",
            registry=registry,
        )
        self.api_keys = Gauge(
            "blockrelay_gateway_api_keys", "API keys that this gateway accepts, 0 without a key file", registry=registry
        )
        self.api_keys_read_at = Gauge(
            "blockrelay_gateway_api_keys_loaded_timestamp_seconds",
            "When this gateway read the API keys that it accepts (Unix seconds), 0 without a key file",
            registry=registry,
        )
        self.api_keys_unreadable = Gauge(
            "blockrelay_gateway_api_keys_unreadable",
            "1 if the key file cannot be read or is wrong, so that the keys read before are still used, else 0",
            registry=registry,
        )
        self.redis_errors = redis_errors(registry)

    def tell_keys(self, count: int, read_at: float, *, unreadable: bool) -> None:
        """Sets the three gauges of the key file: the `count` of its keys, when it was read (Unix seconds), its state.

        `unreadable`: the file cannot be used now, and the keys that were read before stay in force.
        """
        self.api_keys.set(count)
        self.api_keys_read_at.set(read_at)
        self.api_keys_unreadable.set(unreadable)
