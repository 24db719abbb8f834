"""The dashboard of tenants: the use of each API key, from `GET /metrics/tenants`, which needs an operator's key."""

from deploy.dashboards.panel import Dashboard, Panel, Query, increase, mean, rate

TENANTS = Dashboard(
    name="tenants",
    title="Blockrelay / Tenants",
    rows=(
        (
            "By API key",
            (
                Panel(
                    title="Requests accepted",
                    meaning="Per second.",
                    queries=[Query(rate("blockrelay_tenant_accepted_requests_total", "tenant"), "{{tenant}}")],
                    cause="tenants",
                    unit="reqps",
                ),
                Panel(
                    title="Tokens generated",
                    meaning="Per second.",
                    queries=[Query(rate("blockrelay_tenant_generation_tokens_total", "tenant"), "{{tenant}}")],
                    cause="tenants",
                    unit="cps",
                ),
                Panel(
                    title="Prompt tokens",
                    meaning="Per second.",
                    queries=[Query(rate("blockrelay_tenant_prompt_tokens_total", "tenant"), "{{tenant}}")],
                    cause="tenants",
                    unit="cps",
                ),
                Panel(
                    title="Time to first token, mean",
                    meaning="From the acceptance of a request to its first token.",
                    queries=[Query(mean("blockrelay_tenant_time_to_first_token_seconds", "tenant"), "{{tenant}}")],
                    cause="tenants",
                    unit="s",
                ),
                Panel(
                    title="Refused by a limit of the key",
                    meaning="New requests, by the limit that refused them.",
                    queries=[
                        Query(increase("blockrelay_tenant_limited_total", "tenant, limit"), "{{tenant}}: {{limit}}")
                    ],
                    cause="tenants",
                ),
            ),
        ),
    ),
)
