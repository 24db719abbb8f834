"""The dashboard of the pipeline: time by stage, block and device, bubbles, blocks that moved from GPU to CPU."""

from deploy.dashboards.panel import Dashboard, Panel, Query, heat, increase, mean, of_cell, quantile, rate

_SECONDS = "blockrelay_worker_{}_seconds_total"


def _block(share: float) -> Query:
    return Query(quantile(share, "blockrelay_worker_block_latency_seconds", "block, device"), "{{block}} {{device}}")


PIPELINE = Dashboard(
    name="pipeline",
    title="Blockrelay / Pipeline",
    rows=(
        (
            "Stages",
            (
                Panel(
                    title="Latency of a stage",
                    meaning="Time of a stage for one batch, by stage and device.",
                    queries=[
                        Query(
                            quantile(share, "blockrelay_worker_stage_latency_seconds", "stage, device"),
                            f"stage {{{{stage}}}} {{{{device}}}}, p{100 * share:.0f}",
                        )
                        for share in (0.5, 0.99)
                    ],
                    cause="load",
                    unit="s",
                ),
                Panel(
                    title="Workers of each stage",
                    meaning="Ready workers, by the stage's blocks and device. A stage without one stops all requests.",
                    queries=[
                        Query(
                            of_cell("blockrelay_stage_workers", "stage, blocks, device"),
                            "{{stage}}: {{blocks}} {{device}}",
                        )
                    ],
                    cause="kill",
                ),
                Panel(
                    title="Bubbles",
                    meaning="Share of the time in which a worker had requests and none of them had tokens to compute.",
                    queries=[
                        Query(
                            f"{rate(_SECONDS.format('stage_idle'), 'instance')} / ("
                            f"{rate(_SECONDS.format('stage_idle'), 'instance')} + "
                            f"{rate(_SECONDS.format('stage_busy'), 'instance')})",
                            "{{instance}}",
                        )
                    ],
                    cause="load",
                    unit="percentunit",
                ),
                Panel(
                    title="What workers spend their time on",
                    meaning="Seconds per second, all workers together.",
                    queries=[
                        Query(rate(_SECONDS.format("inference")), "blocks"),
                        Query(rate(_SECONDS.format("token_generation")), "choosing tokens"),
                        Query(rate(_SECONDS.format("state_transfer")), "sending hidden states"),
                        Query(rate(_SECONDS.format("cache_management")), "KV pages"),
                    ],
                    cause="load",
                    unit="percentunit",
                ),
                Panel(
                    title="Tokens in a batch",
                    meaning="Mean. Few tokens mean that the machine works for few requests at a time.",
                    queries=[Query(mean("blockrelay_worker_iteration_tokens"))],
                    cause="load",
                ),
                Panel(
                    title="Hidden states sent to the next stage",
                    meaning="Bytes per second: `local` to workers of the same host, `redis` to other hosts.",
                    queries=[Query(rate("blockrelay_worker_forwarded_bytes_total", "way"), "{{way}}")],
                    cause="load",
                    unit="Bps",
                ),
                Panel(
                    title="Plan",
                    meaning="Epoch of the plan in force. It grows when workers come and go, and by `plan apply`.",
                    queries=[Query(of_cell("blockrelay_plan_epoch"))],
                    cause="kill",
                ),
            ),
        ),
        (
            "Blocks",
            (
                Panel(
                    title="Latency of a block, median",
                    meaning="Time of one block for one batch. Look at a block that stands out.",
                    queries=[_block(0.5)],
                    cause="load",
                    unit="s",
                ),
                Panel(
                    title="Latency of a block, p99",
                    meaning="Far above the median: other programs use the machine, or batches differ in size.",
                    queries=[_block(0.99)],
                    cause="load",
                    unit="s",
                ),
                Panel(
                    title="Latency of blocks",
                    meaning="All blocks together: how many batches took how long.",
                    queries=heat("blockrelay_worker_block_latency_seconds"),
                    cause="load",
                    unit="s",
                    kind="heat map",
                ),
                Panel(
                    title="From GPU to CPU",
                    meaning="Blocks that moved during a request, by block and reason.",
                    queries=[
                        Query(increase("blockrelay_worker_fallbacks_total", "block, reason"), "{{block}}: {{reason}}")
                    ],
                    cause="gpu",
                ),
            ),
        ),
    ),
)
