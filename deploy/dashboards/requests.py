"""What do clients feel? First token, time between tokens, the queue, what is refused."""

from deploy.dashboards.panel import Dashboard, Panel, Query, increase, of_cell, of_cell_rate, quantile, quantiles, rate

REQUESTS = Dashboard(
    name="requests",
    title="Blockrelay / Requests",
    rows=(
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
                    meaning="Of one request.",
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
                    title="Time in the queue, p95",
                    meaning="From the acceptance of a request to the worker that takes it.",
                    queries=[Query(quantile(0.95, "blockrelay_worker_request_queue_time_seconds"))],
                    cause="load",
                    unit="s",
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
                    meaning="By reason. `error` and `expired` are what to look at.",
                    queries=[Query(of_cell_rate("blockrelay_ended_total", "reason"), "{{reason}}")],
                    cause="load",
                    unit="reqps",
                ),
                Panel(
                    title="Refused by a limit",
                    meaning="By the limit that refused.",
                    queries=[Query(increase("blockrelay_admission_limited_total", "limit"), "{{limit}}")],
                    cause="overload",
                ),
                Panel(
                    title="Clients that went away",
                    meaning="Before their answer was complete.",
                    queries=[Query(increase("blockrelay_disconnected_clients_total"))],
                    cause="overload",
                ),
                Panel(
                    title="Guessed tokens that were right",
                    meaning="Share of the guessed tokens that were verified (speculation).",
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
