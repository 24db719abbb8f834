"""The dashboard of the Redis servers, from the metrics of their exporter."""

from deploy.dashboards.panel import Dashboard, Panel, Query

_SELECTED = '{job="blockrelay-redis", instance=~"$redis"}'


def _each(metric: str) -> str:
    return f"sum by (instance) ({metric}{_SELECTED})"


def _each_rate(metric: str) -> str:
    return f"sum by (instance) (rate({metric}{_SELECTED}[$__rate_interval]))"


REDIS = Dashboard(
    name="redis",
    title="Blockrelay / Redis",
    variables=("redis",),
    rows=(
        (
            "Both servers",
            (
                Panel(
                    title="Answers",
                    meaning="1: the exporter reaches the server. Without the control Redis no request is accepted.",
                    queries=[Query(_each("redis_up"), "{{instance}}")],
                    cause="redis",
                ),
                Panel(
                    title="Time in commands",
                    meaning="Seconds per second. Commands run one after the other: 100 % is the limit of a cell.",
                    queries=[Query(_each_rate("redis_commands_duration_seconds_total"), "{{instance}}")],
                    cause="load",
                    unit="percentunit",
                ),
                Panel(
                    title="Commands",
                    meaning="Per second. A script counts once, and each command that it calls counts too.",
                    queries=[Query(_each_rate("redis_commands_processed_total"), "{{instance}}")],
                    cause="load",
                    unit="ops",
                ),
                Panel(
                    title="Memory",
                    meaning="Bytes in use, and the most that may be. A full control Redis refuses new requests.",
                    queries=[
                        Query(_each("redis_memory_used_bytes"), "{{instance}}"),
                        Query(_each("redis_memory_max_bytes"), "{{instance}}, at most"),
                    ],
                    cause="memory",
                    unit="bytes",
                ),
                Panel(
                    title="Memory, share",
                    meaning="From 50 % on ended requests are forgotten early, from 70 % on new ones are refused.",
                    queries=[
                        Query(
                            f"{_each('redis_memory_used_bytes')} / ({_each('redis_memory_max_bytes')} > 0)",
                            "{{instance}}",
                        )
                    ],
                    cause="memory",
                    unit="percentunit",
                ),
                Panel(
                    title="Append-only file without errors",
                    meaning="1: the file was written, and rewritten, without an error.",
                    queries=[
                        Query(_each("redis_aof_last_write_status"), "{{instance}}, written"),
                        Query(_each("redis_aof_last_bgrewrite_status"), "{{instance}}, rewritten"),
                    ],
                    cause="rewrite",
                ),
                Panel(
                    title="Append-only file",
                    meaning="Its size. It is rewritten when it has doubled; only the control Redis has one.",
                    queries=[Query(_each("redis_aof_current_size_bytes"), "{{instance}}")],
                    cause="load",
                    unit="bytes",
                ),
                Panel(
                    title="Clients",
                    meaning="Connections, and those of them that wait in a blocking command.",
                    queries=[
                        Query(_each("redis_connected_clients"), "{{instance}}"),
                        Query(_each("redis_blocked_clients"), "{{instance}}, waiting"),
                    ],
                    cause="kill",
                ),
            ),
        ),
    ),
)
