"""`python -m deploy.manifests`: writes the generated files of deploy/k8s.

They are copies of what kustomize cannot read where it is: the alerts of deploy/prometheus as a PrometheusRule, and the
Redis users as values for the chart of Valkey. `--docs URL` first makes URL the address of the documentation in the
links of the alerts.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent

import yaml

from blockrelay.redis.users import ROLES, rules

DEPLOY = Path(__file__).resolve().parent
RULES = DEPLOY / "prometheus" / "alerts.yml"
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
_LINK = re.compile(r"(?<=runbook_url: )\S+(?=/runbooks/)")


def linked(text: str, docs: str) -> str:
    """Returns `text`, the alerts, with links to the runbooks below the address `docs`."""
    return _LINK.sub(lambda _: docs.rstrip("/"), text)


def alerts() -> str:
    """Returns a PrometheusRule with the groups of alerts.yml."""
    return _MADE + _RULE + indent(RULES.read_text(), "  ")


def valkey_users() -> str:
    """Returns the users of the control Redis as values for valkey-helm.

    The chart puts name and password digest before the permissions itself. It needs no user `reloader`, because it has
    the server read its users in a way of its own.
    """
    lines = (line.split(maxsplit=4) for line in rules("control"))
    users = {
        name: {"permissions": permissions}
        for _, name, *digest, permissions in lines
        if digest and name in ROLES and name != "reloader"
    }
    return _MADE + yaml.safe_dump({"auth": {"aclUsers": users}}, sort_keys=False, width=10_000)


FILES = {ALERTS: alerts, VALKEY_USERS: valkey_users}


def _address(text: str) -> str:
    if re.fullmatch(r"https?://\S+", text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is no address: give one such as https://wiki.example.com/blockrelay")


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes all generated files. `arguments` are those of the command line; None: of this process."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.manifests", description="Write the generated files of deploy/k8s."
    )
    parser.add_argument(
        "--docs", metavar="URL", type=_address, help="Address of the pages of docs/, for the links of alerts."
    )
    if docs := parser.parse_args(arguments).docs:
        RULES.write_text(linked(RULES.read_text(), docs))
    for path, content in FILES.items():
        path.write_text(content())


if __name__ == "__main__":
    main()
