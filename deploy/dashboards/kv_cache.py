"""The dashboard of KV pages: their use on workers, the prefix cache, and the tiers of the page store."""

from deploy.dashboards.panel import Dashboard, Panel, Query, increase, of_cell, of_cell_increase, of_processes, rate

KV_CACHE = Dashboard(
    name="kv-cache",
    title="Blockrelay / KV and prefix cache",
    rows=(
        (
            "KV pages",
            (
                Panel(
                    title="KV pages in use",
                    meaning="Share in use, in the stage of the cell with the fewest free pages.",
                    queries=[Query(of_cell("blockrelay_kv_cache_usage_ratio"))],
                    cause="load",
                    unit="percentunit",
                ),
                Panel(
                    title="KV pages by worker",
                    meaning="Share in use, by worker.",
                    queries=[Query(of_processes("blockrelay_worker_kv_cache_usage_ratio", "instance"), "{{instance}}")],
                    cause="load",
                    unit="percentunit",
                ),
                Panel(
                    title="Preemptions",
                    meaning="Runs that gave their KV pages to older ones and are computed again: memory is short.",
                    queries=[
                        Query(increase("blockrelay_worker_num_preemptions_total"), "one stage"),
                        Query(
                            of_cell_increase("blockrelay_reruns_total", where='reason="preempted"'), "several stages"
                        ),
                    ],
                    cause="crowd",
                ),
            ),
        ),
        (
            "Prefix cache",
            (
                Panel(
                    title="Prefix hits",
                    meaning="Share of the prompt tokens looked up that were found in the pool or in a tier.",
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
                    title="Cached KV pages without a user",
                    meaning="Pages kept for later prefix hits. They are evicted when room is needed.",
                    queries=[Query(of_processes("blockrelay_worker_kv_pages_cached", "instance"), "{{instance}}")],
                    cause="prefixes",
                ),
                Panel(
                    title="KV pages evicted",
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
                    title="Look-ups in tiers",
                    meaning="Pages per second that a tier had, and that it did not have.",
                    queries=[
                        Query(rate("blockrelay_worker_page_store_hits_total", "tier"), "{{tier}} found"),
                        Query(rate("blockrelay_worker_page_store_misses_total", "tier"), "{{tier}} missing"),
                    ],
                    cause="prefixes",
                    unit="ops",
                ),
                Panel(
                    title="Bytes that a tier holds",
                    meaning="As counted by each worker. All workers share `redis`; the other tiers are a host's.",
                    queries=[
                        Query(of_cell("blockrelay_worker_page_store_bytes", "tier, instance"), "{{tier}} {{instance}}")
                    ],
                    cause="prefixes",
                    unit="bytes",
                ),
                Panel(
                    title="Trouble with tiers",
                    meaning="A tier was full or unreachable, or had a corrupt page, which was computed again.",
                    queries=[
                        Query(increase("blockrelay_worker_page_store_trouble_total", "tier, kind"), "{{tier}} {{kind}}")
                    ],
                    cause="tiers",
                ),
            ),
        ),
    ),
)
