"""`python -m deploy.manifests`: write anew what deploy/k8s has from elsewhere, where kustomize cannot read it there.

The alerts of deploy/prometheus, and the Redis users as values for the chart of Valkey.
"""

from pathlib import Path
from textwrap import indent

import yaml

from blockrelay.redis.users import ROLES, rules

DEPLOY = Path(__file__).resolve().parent
ALERTS = DEPLOY / "k8s" / "components" / "prometheus-operator" / "alerts.yaml"
VALKEY_USERS = DEPLOY / "k8s" / "charts" / "valkey-users.yaml"
_MADE = "# Made by `make manifests`; do not edit.\n"
_RULE = """\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: blockrelay
spec:
"""


def alerts() -> str:
    """A PrometheusRule with the groups of alerts.yml."""
    return _MADE + _RULE + indent((DEPLOY / "prometheus" / "alerts.yml").read_text(), "  ")


def valkey_users() -> str:
    """Values for valkey-helm, which puts name and digest before what it calls permissions, and has the server read its
    users in a way of its own."""
    lines = (line.split(maxsplit=4) for line in rules("control"))
    users = {
        name: {"permissions": rights}
        for _, name, *more, rights in lines
        if more and name in ROLES and name != "reloader"
    }
    return _MADE + yaml.safe_dump({"auth": {"aclUsers": users}}, sort_keys=False, width=10_000)


FILES = {ALERTS: alerts, VALKEY_USERS: valkey_users}


def main() -> None:
    for path, content in FILES.items():
        path.write_text(content())


if __name__ == "__main__":
    main()
