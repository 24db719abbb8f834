"""Is there room? KV pages of workers, the prefix cache, the page store's tiers."""

from deploy.dashboards.panel import Dashboard, Panel, Query, increase, of_cell, of_processes, rate

KV_CACHE = Dashboard(
    name="kv-cache",
    title="Blockrelay / KV and prefix cache",
    rows=(
        (
            "KV pages",
            (
                Panel(
                    title="KV pages in use",
                    meaning="Share, in the stage of the cell that has least left.",
                    queries=[Query(of_cell("blockrelay_kv_cache_usage_ratio"))],
                    cause="load",
                    unit="percentunit",
                ),
                Panel(
                    title="KV pages by worker",
                    meaning="Share in use, by process.",
                    queries=[Query(of_processes("blockrelay_worker_kv_cache_usage_ratio", "instance"), "{{instance}}")],
                    cause="load",
                    unit="percentunit",
                ),
                Panel(
                    title="Preemptions",
                    meaning="Runs that gave their KV pages to older ones and are computed again: memory is short.",
                    queries=[Query(increase("blockrelay_worker_num_preemptions_total"))],
                    cause="crowd",
                ),
            ),
        ),
        (
            "Prefix cache",
            (
                Panel(
                    title="Prompt tokens that were found",
                    meaning="Share of the tokens looked up, in the pool or in a tier.",
                    queries=[
                        Query(
                            f"{rate('blockrelay_worker_prefix_cache_hits_total')} / "
                            f"{rate('blockrelay_worker_prefix_cache_queries_total')}"
                        )
                    ],
                    cause="prefixes",
                    unit="percentunit",
                ),
                Panel(
                    title="KV pages kept for their name",
                    meaning="Without a user. They give way when room is needed.",
                    queries=[Query(of_processes("blockrelay_worker_kv_pages_cached", "instance"), "{{instance}}")],
                    cause="prefixes",
                ),
                Panel(
                    title="KV pages that gave way",
                    meaning="Cached pages of the pool that made room for others.",
                    queries=[Query(increase("blockrelay_worker_prefix_cache_evictions_total"))],
                    cause="crowd",
                ),
            ),
        ),
        (
            "Page store",
            (
                Panel(
                    title="Pages that a tier gave",
                    meaning="Per second, and what it was asked for and did not have.",
                    queries=[
                        Query(rate("blockrelay_worker_page_store_hits_total", "tier"), "{{tier}} found"),
                        Query(rate("blockrelay_worker_page_store_misses_total", "tier"), "{{tier}} missing"),
                    ],
                    cause="prefixes",
                    unit="ops",
                ),
                Panel(
                    title="Bytes that a tier holds",
                    meaning="As far as each worker knows: `redis` is one for all, others are of a host.",
                    queries=[
                        Query(of_cell("blockrelay_worker_page_store_bytes", "tier, instance"), "{{tier}} {{instance}}")
                    ],
                    cause="prefixes",
                    unit="bytes",
                ),
                Panel(
                    title="Trouble with tiers",
                    meaning="Full, unreachable, or a page that was corrupt and computed anew.",
                    queries=[
                        Query(increase("blockrelay_worker_page_store_trouble_total", "tier, kind"), "{{tier}} {{kind}}")
                    ],
                    cause="tiers",
                ),
            ),
        ),
    ),
)
