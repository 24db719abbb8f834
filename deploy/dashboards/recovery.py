"""The dashboard of failures and their repair: deaths, re-runs, stalls, dead letters, upgrades."""

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
                    meaning="Declared dead: without heartbeats, or ended under the `blockrelay up` that started them.",
                    queries=[Query(of_cell_increase("blockrelay_worker_deaths_total"))],
                    cause="kill",
                ),
                Panel(
                    title="Commits by verdict",
                    meaning="LOST: the run was no longer the current one. DIVERGED must never happen.",
                    queries=[Query(increase("blockrelay_worker_commits_total", "verdict"), "{{verdict}}")],
                    cause="load",
                ),
                Panel(
                    title="Longest without progress",
                    meaning="Time since the last progress of the request that has waited longest for any.",
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
                    meaning="Requests that crashed workers or could not be computed: see `blockrelay dead-letters`.",
                    queries=[Query(of_cell("blockrelay_dead_letters"))],
                    cause="poison",
                ),
                Panel(
                    title="Re-runs without a worker of their numerics id",
                    meaning="Re-runs that wait for such a worker, and after a while go on under another id.",
                    queries=[Query(of_cell("blockrelay_requests_without_numerics"))],
                    cause="numerics",
                ),
                Panel(
                    title="Ended requests that can still be read",
                    meaning="Requests whose retention time is not over.",
                    queries=[Query(of_cell("blockrelay_ended_requests"))],
                    cause="load",
                ),
                Panel(
                    title="Ended requests forgotten early",
                    meaning="Requests deleted before their retention was over: Redis is too small.",
                    queries=[Query(increase("blockrelay_ended_requests_forgotten_total"))],
                    cause="memory",
                ),
                Panel(
                    title="Releases",
                    meaning="Processes of each release and protocol. There are two releases during an upgrade.",
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
                    meaning="Number of state machines in each state.",
                    queries=[Query(of_processes("blockrelay_state", "machine, state"), "{{machine}} {{state}}")],
                    cause="kill",
                ),
            ),
        ),
    ),
)
