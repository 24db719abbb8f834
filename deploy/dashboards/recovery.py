"""What went wrong, and was mended: deaths, re-runs, stalls, dead letters, hand-overs between releases."""

from deploy.dashboards.panel import Dashboard, Panel, Query, increase, of_cell, of_cell_increase, of_processes

RECOVERY = Dashboard(
    name="recovery",
    title="Blockrelay / Recovery",
    rows=(
        (
            "Re-runs",
            (
                Panel(
                    title="Re-runs",
                    meaning="Runs that were ended and queued again, by reason. The answers are the same.",
                    queries=[Query(of_cell_increase("blockrelay_reruns_total", "reason"), "{{reason}}")],
                    cause="kill",
                ),
                Panel(
                    title="Workers that died",
                    meaning="Declared dead: silent, or seen to end by the `blockrelay up` that had started them.",
                    queries=[Query(of_cell_increase("blockrelay_worker_deaths_total"))],
                    cause="kill",
                ),
                Panel(
                    title="Commits by verdict",
                    meaning="LOST: of a run that was no longer the current one. DIVERGED must never be.",
                    queries=[Query(increase("blockrelay_worker_commits_total", "verdict"), "{{verdict}}")],
                    cause="load",
                ),
                Panel(
                    title="Longest without progress",
                    meaning="For how long the request that has stood still longest has made no progress.",
                    queries=[Query(of_cell("blockrelay_oldest_waiting_seconds"))],
                    cause="kill",
                    unit="s",
                ),
            ),
        ),
        (
            "What is left behind",
            (
                Panel(
                    title="Dead letters",
                    meaning="Requests that ended their workers or could not be computed: `blockrelay dead-letters`.",
                    queries=[Query(of_cell("blockrelay_dead_letters"))],
                    cause="poison",
                ),
                Panel(
                    title="Re-runs without a worker of their numerics id",
                    meaning="They wait, then go on under another id.",
                    queries=[Query(of_cell("blockrelay_requests_without_numerics"))],
                    cause="numerics",
                ),
                Panel(
                    title="Ended requests that can still be read",
                    meaning="Until their retention is over.",
                    queries=[Query(of_cell("blockrelay_ended_requests"))],
                    cause="load",
                ),
                Panel(
                    title="Ended requests forgotten early",
                    meaning="Redis is too small for the retention.",
                    queries=[Query(increase("blockrelay_ended_requests_forgotten_total"))],
                    cause="memory",
                ),
                Panel(
                    title="Releases",
                    meaning="Processes of each release and protocol; two during an upgrade.",
                    queries=[
                        Query(
                            of_processes("blockrelay_build_info", "version, protocol, service"),
                            "{{service}} {{version}}, protocol {{protocol}}",
                        )
                    ],
                    cause="kill",
                ),
                Panel(
                    title="States of workers and schedulers",
                    meaning="How many state machines are in each state.",
                    queries=[Query(of_processes("blockrelay_state", "machine, state"), "{{machine}} {{state}}")],
                    cause="kill",
                ),
            ),
        ),
    ),
)
