"""The dashboard of requests as clients see them: errors, refusals, latencies, the queue, lengths."""

from deploy.dashboards.panel import (
    Dashboard,
    Panel,
    Query,
    errors,
    heat,
    increase,
    of_cell,
    of_cell_rate,
    quantiles,
    rate,
)

REQUESTS = Dashboard(
    name="requests",
    title="Blockrelay / Requests",
    rows=(
        (
            "Errors and refusals",
            (
                Panel(
                    title="Errors of ours",
                    meaning="Share of requests that were refused with a 5xx, or ended by `error`.",
                    queries=[errors()],
                    cause="overload",
                    unit="percentunit",
                ),
                Panel(
                    title="Refused, by route and reason",
                    meaning="The reason is a limit, or a client's mistake such as `malformed` or `unauthorized`.",
                    queries=[
                        Query(
                            f"{increase('blockrelay_refused_requests_total', 'route, reason')} > 0",
                            "{{route}} {{reason}}",
                        )
                    ],
                    cause="overload",
                ),
            ),
        ),
        (
            "Latency",
            (
                Panel(
                    title="Time to first token",
                    meaning="From the acceptance of a request to its first token.",
                    queries=quantiles("blockrelay_time_to_first_token_seconds"),
                    cause="load",
                    unit="s",
                ),
                Panel(
                    title="Time between tokens",
                    meaning="Seconds between two tokens of one request.",
                    queries=quantiles("blockrelay_inter_token_latency_seconds"),
                    cause="load",
                    unit="s",
                ),
                Panel(
                    title="Whole requests",
                    meaning="From the acceptance of a request to its end.",
                    queries=quantiles("blockrelay_e2e_request_latency_seconds"),
                    cause="load",
                    unit="s",
                ),
                Panel(
                    title="Time in the queue",
                    meaning="From the acceptance of a request until a worker takes it.",
                    queries=quantiles("blockrelay_worker_request_queue_time_seconds"),
                    cause="load",
                    unit="s",
                ),
                Panel(
                    title="Prefill time",
                    meaning="From the moment a worker takes a request to its first token.",
                    queries=quantiles("blockrelay_worker_request_prefill_time_seconds"),
                    cause="load",
                    unit="s",
                ),
                Panel(
                    title="Decode time",
                    meaning="From the first token of a request to its end.",
                    queries=quantiles("blockrelay_request_decode_time_seconds"),
                    cause="load",
                    unit="s",
                ),
            ),
        ),
        (
            "Lengths",
            (
                Panel(
                    title="Prompt lengths",
                    meaning="Tokens of the prompts of requests that ended.",
                    queries=heat("blockrelay_request_prompt_tokens"),
                    cause="load",
                    kind="heat map",
                ),
                Panel(
                    title="Answer lengths",
                    meaning="Generated tokens of requests that ended.",
                    queries=heat("blockrelay_request_generation_tokens"),
                    cause="load",
                    kind="heat map",
                ),
            ),
        ),
        (
            "Queue",
            (
                Panel(
                    title="Jobs that wait",
                    meaning="First runs (jobs) and re-runs, by route class.",
                    queries=[Query(of_cell("blockrelay_queue_depth", "stream"), "{{stream}}")],
                    cause="numerics",
                ),
                Panel(
                    title="Requests ended",
                    meaning="Per second, by reason. `error` and `expired` need attention.",
                    queries=[Query(of_cell_rate("blockrelay_ended_total", "reason"), "{{reason}}")],
                    cause="load",
                    unit="reqps",
                ),
                Panel(
                    title="Refused by a limit",
                    meaning="New requests, by the limit that refused them.",
                    queries=[Query(increase("blockrelay_admission_limited_total", "limit"), "{{limit}}")],
                    cause="overload",
                ),
                Panel(
                    title="Clients that went away",
                    meaning="Clients that closed the connection before their answer was complete.",
                    queries=[Query(increase("blockrelay_disconnected_clients_total"))],
                    cause="overload",
                ),
                Panel(
                    title="Draft tokens accepted",
                    meaning="Share of the draft tokens that were verified as right (speculative decoding).",
                    queries=[
                        Query(
                            f"{rate('blockrelay_worker_spec_decode_num_accepted_tokens_total')} / "
                            f"{rate('blockrelay_worker_spec_decode_num_draft_tokens_total')}"
                        )
                    ],
                    cause="prefixes",
                    unit="percentunit",
                ),
            ),
        ),
    ),
)
