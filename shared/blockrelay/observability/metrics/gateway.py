"""Metrics of a gateway: its requests, its answers, and gauges of its cell that a Kubernetes gateway balances by."""

from typing import Literal, get_args

from prometheus_client import CollectorRegistry

from blockrelay.observability.metrics.instruments import (
    LENGTH_BUCKETS,
    REQUEST_BUCKETS,
    STEP_BUCKETS,
    TTFT_BUCKETS,
    Instruments,
    expect_blocks,
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
#: HTTP statuses of refused new requests whose series exist from the start (`blockrelay_gateway.http.errors`). Another
#: one, such as 415 for a compressed body, gets its series when it first comes.
STATUSES = ("400", "401", "403", "404", "408", "409", "413", "421", "422", "429", "499", "500", "503", "504")
#: Fields of OpenAI's requests that change nothing here (`blockrelay_gateway.api.openai.strictness`).
IGNORED_FIELDS = (
    *("client_metadata", "messages", "metadata", "moderation", "prediction", "prompt_cache_key"),
    *("prompt_cache_options", "prompt_cache_retention", "reasoning_effort", "safety_identifier", "service_tier"),
    *("store", "stream_options", "user", "verbosity"),
)
#: How it ended that a gateway kept requests: there was room, or none until the end, or the client left.
KEPT_OUTCOMES = ("accepted", "refused", "left")
#: The two checks of `/readyz`: can requests be computed now, and are requests accepted.
Question = Literal["tokens", "accepting"]


class GatewayMetrics:
    """Metrics of a gateway for one cell."""

    def __init__(self, registry: CollectorRegistry, *, blocks: int = 0) -> None:
        """`blocks`: the model's number of blocks. The fallback series of each of them exist from the start."""
        self.registry = registry
        make = Instruments(registry)
        self.requests = make.counter(
            "blockrelay_finished_requests", "Requests that ended, by reason", finished_reason=get_args(EndReason)
        )
        self.rejections = make.counter(
            "blockrelay_admission_rejections", "New requests that were refused, by HTTP status", status=STATUSES
        )
        self.refused = make.counter(
            "blockrelay_refused_requests",
            "New requests that were refused, by route and reason: the limit, or the kind of error",
            route=(*NEW_REQUESTS, SOCKET),
            reason=REFUSALS,
        )
        self.refused_unread = make.counter(
            "blockrelay_refused_unread",
            "New requests that got their client's last refusal again, unread: too many of the client were refused",
        )
        self.ignored_fields = make.counter(
            "blockrelay_ignored_fields",
            "Requests with a field that is accepted and has no effect, by field",
            field=IGNORED_FIELDS,
        )
        self.limited = make.counter(
            "blockrelay_admission_limited",
            f"New requests that a limit refused, by limit: {', '.join(CLIENT_LIMITS)} (of the client), "
            f"{', '.join(CELL_LIMITS)} (ours), {SHARED_LIMIT} (both)",
            limit=LIMITS,
        )
        self.prompt_tokens = make.counter("blockrelay_prompt_tokens", "Prompt tokens of accepted requests")
        self.generation_tokens = make.counter(
            "blockrelay_generation_tokens", "Generated tokens of requests that this gateway accepted"
        )
        self.time_to_first_token = make.histogram(
            "blockrelay_time_to_first_token_seconds",
            "Time from the acceptance of a request to its first token",
            TTFT_BUCKETS,
        )
        self.inter_token_latency = make.histogram(
            "blockrelay_inter_token_latency_seconds", "Time between two tokens of a request", STEP_BUCKETS
        )
        self.e2e_latency = make.histogram(
            "blockrelay_e2e_request_latency_seconds",
            "Time from the acceptance of a request to its end",
            REQUEST_BUCKETS,
        )
        self.decode_time = make.histogram(
            "blockrelay_request_decode_time_seconds",
            "Time from the first token of a request to its end",
            REQUEST_BUCKETS,
        )
        self.prompt_length = make.histogram(
            "blockrelay_request_prompt_tokens", "Prompt tokens of each request that ended", LENGTH_BUCKETS
        )
        self.answer_length = make.histogram(
            "blockrelay_request_generation_tokens", "Generated tokens of each request that ended", LENGTH_BUCKETS
        )
        self.disconnected = make.counter(
            "blockrelay_disconnected_clients", "Requests whose last client disconnected before the end"
        )
        self.fallbacks = make.fallbacks(
            "blockrelay_request_fallbacks",
            "Fallbacks reported by ended requests (workers count blockrelay_worker_fallbacks as they happen)",
        )
        expect_blocks(self.fallbacks, 1, blocks)
        self.forgotten = make.counter(
            "blockrelay_ended_requests_forgotten",
            "Ended requests that were deleted before their retention was over, because memory was short",
        )
        self.running_requests = make.gauge(
            "blockrelay_gateway_requests_running",
            "Requests whose tokens this gateway reads and that have at least one token",
        )
        self.waiting_requests = make.gauge(
            "blockrelay_gateway_requests_waiting", "Requests whose tokens this gateway reads and that have no token yet"
        )
        self._kept = 0
        self.kept_requests = make.gauge(
            "blockrelay_gateway_requests_kept",
            "Requests with `Prefer: wait` that this gateway keeps until there is room for them",
        )
        self.kept_seconds = make.histogram(
            "blockrelay_gateway_request_kept_seconds",
            f"Time for which requests with `Prefer: wait` were kept, by outcome: {', '.join(KEPT_OUTCOMES)}",
            TTFT_BUCKETS,
            "outcome",
        )
        for outcome in KEPT_OUTCOMES:
            self.kept_seconds.labels(outcome)
        self.running = make.gauge("blockrelay_num_requests_running", "Requests of the cell that are on workers")
        self.waiting = make.gauge(
            "blockrelay_num_requests_waiting",
            "Requests of the cell that wait for a worker, and those that this gateway keeps until there is room",
        )
        self.kv_cache_usage = make.gauge(
            "blockrelay_kv_cache_usage_ratio",
            "Share of KV pages in use (0 to 1), in the stage of the cell that has the fewest left",
        )
        self.ready = make.gauge(
            "blockrelay_ready", "1 if `/readyz` would answer that the gateway is ready, else 0, by question", "question"
        )
        for question in get_args(Question):
            self.ready.labels(question)
        self.cell_list_version = make.gauge(
            "blockrelay_cell_list_version", "Version of the list of cells that this gateway uses, 0 without one"
        )
        self.api_keys = make.gauge(
            "blockrelay_gateway_api_keys", "API keys that this gateway accepts, 0 without a key file"
        )
        self.api_keys_read_at = make.gauge(
            "blockrelay_gateway_api_keys_loaded_timestamp_seconds",
            "When this gateway read the API keys that it accepts (Unix seconds), 0 without a key file",
        )
        self.api_keys_unreadable = make.gauge(
            "blockrelay_gateway_api_keys_unreadable",
            "1 if the key file cannot be read or is wrong, so that the keys read before are still used, else 0",
        )
        self.redis_errors = redis_errors(registry)

    def tell_kept(self, requests: int) -> None:
        """Sets the number of requests that the gateway keeps until there is room for them."""
        self._kept = requests
        self.kept_requests.set(requests)

    def tell_load(self, *, running: int, waiting: int, kv_usage: float) -> None:
        """Sets the gauges of the cell: requests on workers, requests without one, and the share of KV pages in use."""
        self.running.set(running)
        self.waiting.set(waiting + self._kept)
        self.kv_cache_usage.set(kv_usage)

    def tell_keys(self, count: int, read_at: float, *, unreadable: bool) -> None:
        """Sets the three gauges of the key file: the `count` of its keys, when it was read (Unix seconds), its state.

        `unreadable`: the file cannot be used now, and the keys that were read before stay in force.
        """
        self.api_keys.set(count)
        self.api_keys_read_at.set(read_at)
        self.api_keys_unreadable.set(unreadable)
