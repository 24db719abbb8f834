"""The dashboard of the whole system: errors, saturation, readiness, requests and tokens, workers."""

from deploy.dashboards.panel import (
    SELECTED,
    Dashboard,
    Panel,
    Query,
    errors,
    increase,
    of_cell,
    of_cell_rate,
    of_processes,
    rate,
)

SYSTEM = Dashboard(
    name="system",
    title="Blockrelay / System",
    rows=(
        (
            "Errors and saturation",
            (
                Panel(
                    title="Errors of ours",
                    meaning="Share of requests that were refused with a 5xx, or ended by `error`. Alerts allow 0.1 %.",
                    queries=[errors()],
                    cause="overload",
                    unit="percentunit",
                ),
                Panel(
                    title="Saturation",
                    meaning="KV pages in use of the fullest stage, and the busiest worker. At 100 % queues grow.",
                    queries=[
                        Query(of_cell("blockrelay_kv_cache_usage_ratio"), "KV pages"),
                        Query(
                            f"max ({rate('blockrelay_worker_stage_busy_seconds_total', 'instance')})", "busiest worker"
                        ),
                    ],
                    cause="load",
                    unit="percentunit",
                ),
            ),
        ),
        (
            "Now",
            (
                Panel(
                    title="Accepts requests",
                    meaning="1: Redis answers and a gateway accepts requests. They wait while no worker is ready.",
                    queries=[Query(of_cell("blockrelay_ready", where='question="accepting"'))],
                    cause="redis",
                    kind="number",
                ),
                Panel(
                    title="Produces tokens",
                    meaning="1: every stage of the plan has a live worker.",
                    queries=[Query(of_cell("blockrelay_ready", where='question="tokens"'))],
                    cause="kill",
                    kind="number",
                ),
                Panel(
                    title="Longest without progress",
                    meaning="Time since the last progress of the request that has waited longest for any.",
                    queries=[Query(of_cell("blockrelay_oldest_waiting_seconds"))],
                    cause="kill",
                    unit="s",
                    kind="number",
                ),
                Panel(
                    title="Accounting: accepted, neither ended nor in flight",
                    meaning="0, always. Redis keeps the counts, so the end of a process does not reset them.",
                    queries=[
                        Query(
                            f"max by (cell) (blockrelay_accepted_total{{{SELECTED}}}"
                            f" - on (cell, instance) sum by (cell, instance) (blockrelay_ended_total{{{SELECTED}}})"
                            f" - on (cell, instance) blockrelay_requests_in_flight{{{SELECTED}}})",
                            "{{cell}}",
                        )
                    ],
                    cause="books",
                    kind="number",
                ),
            ),
        ),
        (
            "Requests and tokens",
            (
                Panel(
                    title="Requests accepted and ended",
                    meaning="Requests per second; ended ones by reason.",
                    queries=[
                        Query(of_cell_rate("blockrelay_accepted_total"), "accepted"),
                        Query(of_cell_rate("blockrelay_ended_total", "reason"), "{{reason}}"),
                    ],
                    cause="load",
                    unit="reqps",
                ),
                Panel(
                    title="Tokens",
                    meaning="Per second: tokens generated for clients, and tokens of their prompts.",
                    queries=[
                        Query(rate("blockrelay_generation_tokens_total"), "generated"),
                        Query(rate("blockrelay_prompt_tokens_total"), "prompts"),
                    ],
                    cause="load",
                    unit="cps",
                ),
                Panel(
                    title="In flight",
                    meaning="Unfinished requests: on workers, and waiting for one.",
                    queries=[
                        Query(of_cell("blockrelay_num_requests_running"), "running"),
                        Query(of_cell("blockrelay_num_requests_waiting"), "waiting"),
                    ],
                    cause="load",
                ),
                Panel(
                    title="Refused",
                    meaning="New requests that were refused, by HTTP status.",
                    queries=[Query(increase("blockrelay_admission_rejections_total", "status"), "{{status}}")],
                    cause="overload",
                ),
            ),
        ),
        (
            "Workers and Redis",
            (
                Panel(
                    title="Workers",
                    meaning="By device and state. A `silent` worker will be declared dead.",
                    queries=[Query(of_cell("blockrelay_workers", "device, state"), "{{device}} {{state}}")],
                    cause="kill",
                ),
                Panel(
                    title="Workers wanted",
                    meaning="Workers that the unfinished requests need, and workers that are ready.",
                    queries=[
                        Query(of_cell("blockrelay_workers_wanted", "device"), "{{device}} wanted"),
                        Query(of_cell("blockrelay_workers", "device", where='state="ready"'), "{{device}} ready"),
                    ],
                    cause="load",
                ),
                Panel(
                    title="Backlog",
                    meaning="Time that the present workers need for all unfinished requests.",
                    queries=[Query(of_cell("blockrelay_backlog_seconds"))],
                    cause="load",
                    unit="s",
                ),
                Panel(
                    title="Trouble with Redis",
                    meaning="Errors of Redis, such as lost connections, by service.",
                    queries=[Query(increase("blockrelay_redis_errors_total", "job"), "{{job}}")],
                    cause="redis",
                ),
                Panel(
                    title="Memory of processes",
                    meaning="Resident bytes of all processes of a service.",
                    queries=[Query('sum by (job) (process_resident_memory_bytes{job=~"blockrelay.*"})', "{{job}}")],
                    cause="load",
                    unit="bytes",
                ),
                Panel(
                    title="Streams that a gateway follows",
                    meaning="Streams that have had their first token, and streams that still wait for it.",
                    queries=[
                        Query(of_processes("blockrelay_gateway_requests_running"), "running"),
                        Query(of_processes("blockrelay_gateway_requests_waiting"), "waiting"),
                    ],
                    cause="load",
                ),
            ),
        ),
    ),
)
