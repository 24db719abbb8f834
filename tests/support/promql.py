"""Queries of dashboards and alerts, with what Grafana fills in."""

#: Over how much of the past a rate is taken where a test asks.
RATE_INTERVAL = "15s"


def filled_in(expr: str, interval: str = RATE_INTERVAL) -> str:
    """`expr` for all cells and models."""
    return expr.replace("$__rate_interval", interval).replace("$cell", ".+").replace("$model", ".+")
