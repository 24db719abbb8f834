"""Grafana's dashboards as data and the JSON that is made of them: `python -m deploy.dashboards`."""
