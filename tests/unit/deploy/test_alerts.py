"""Alerts without a Prometheus: each asks for what there is, has a runbook, and the runbook begins with a command.

Whether it fires, and whether the command names the culprit: tests/observability.
"""

import re
from typing import Any

import promql_parser
import pytest
import yaml

from tests.support.project import ROOT
from tests.support.promql import grouped_by, registered, selectors

(GROUP,) = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
RULES: list[dict[str, Any]] = GROUP["rules"]
RUNBOOKS = ROOT / "docs" / "runbooks"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_there_is(rule: dict[str, Any]) -> None:
    known = registered() | {"up": {"job", "instance"}}
    tree = promql_parser.parse(rule["expr"])
    kept = set(grouped_by(tree))
    for selector in selectors(tree):
        assert selector.name in known, f"{selector.name} is no metric of ours"
        asked = {matcher.name for matcher in selector.matchers.matchers}
        assert asked <= known[selector.name], f"{selector.name} has no labels {asked - known[selector.name]}"
    told = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    assert told <= (kept or known["up"]), "the summary names a label that the query does not keep"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_has_a_page_that_begins_with_a_command(rule: dict[str, Any]) -> None:
    page = ROOT / rule["annotations"]["runbook_url"]
    assert page.parent == RUNBOOKS
    text = page.read_text()
    assert text.startswith(f"# {rule['alert']}\n")
    assert re.search(r"^```sh\n(blockrelay|curl|promtool) .*\n```$", text, re.M), "one command"
    assert f"[{rule['alert']}]({page.name})" in (RUNBOOKS / "index.md").read_text()
    assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_no_page_is_without_an_alert_and_every_page_is_in_the_navigation() -> None:
    pages = {path.name for path in RUNBOOKS.glob("*.md")} - {"index.md"}
    assert pages == {rule["annotations"]["runbook_url"].rpartition("/")[2] for rule in RULES}
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert all(f"- runbooks/{page}\n" in navigation for page in (*pages, "index.md"))


def test_only_alerts_that_exist_are_silenced_by_others() -> None:
    names = {rule["alert"] for rule in RULES}
    config = yaml.safe_load((ROOT / "deploy" / "alertmanager" / "alertmanager.yml").read_text())
    for rule in config["inhibit_rules"]:
        for matcher in (*rule["source_matchers"], *rule["target_matchers"]):
            assert set(re.findall(r"Blockrelay\w+", matcher)) <= names
