"""Alerts without a Prometheus: each asks for what there is, has a runbook, and the runbook begins with a command.

Whether it fires, and whether the command names the culprit: tests/observability.
"""

import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from deploy.manifests import RULES as FILE
from deploy.manifests import linked
from tests.support.project import ROOT
from tests.support.promql import CERT_MANAGER, KUBELET, grouped_by, misread, registered, selectors

ALL: list[dict[str, Any]] = [rule for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]]
RULES = [rule for rule in ALL if "alert" in rule]
#: What is computed ahead, and the labels that it keeps.
RECORDED = {rule["record"]: set(grouped_by(promql_parser.parse(rule["expr"]))) for rule in ALL if "record" in rule}
KNOWN = registered() | RECORDED | {"up": {"job", "instance"}} | KUBELET | CERT_MANAGER
RUNBOOKS = ROOT / "docs" / "runbooks"


def page_of(rule: dict[str, Any]) -> Path:
    """The page of docs/ that is served at the link."""
    _, _, name = rule["annotations"]["runbook_url"].rpartition("/")
    return RUNBOOKS / name.replace(".html", ".md")


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_asks_for_what_there_is(rule: dict[str, Any]) -> None:
    tree = promql_parser.parse(rule["expr"])
    kept = set(grouped_by(tree))
    assert not misread(tree)
    for selector in selectors(tree):
        assert selector.name in KNOWN, f"{selector.name} is no metric of ours"
        asked = {matcher.name for matcher in selector.matchers.matchers}
        assert asked <= KNOWN[selector.name], f"{selector.name} has no labels {asked - KNOWN[selector.name]}"
        kept |= KNOWN[selector.name] if not set(grouped_by(tree)) else set()
    told = set(re.findall(r"\$labels\.(\w+)", rule.get("annotations", {}).get("summary", "")))
    assert told <= kept, "the summary names a label that the query does not keep"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_has_a_page_that_begins_with_a_command(rule: dict[str, Any]) -> None:
    page = page_of(rule)
    text = page.read_text()
    assert re.match(rf"# (\w+, )*{rule['alert']}(, \w+)*\n", text)
    assert re.search(r"^```sh\n(blockrelay|curl|promtool) .*\n```$", text, re.M), "one command"
    assert f"[{rule['alert']}]({page.name})" in (RUNBOOKS / "index.md").read_text()
    assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_no_page_is_without_an_alert_and_every_page_is_in_the_navigation() -> None:
    pages = {path.name for path in RUNBOOKS.glob("*.md")} - {"index.md"}
    assert pages == {page_of(rule).name for rule in RULES}
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert all(f"- runbooks/{page}\n" in navigation for page in (*pages, "index.md"))


def test_every_link_is_absolute_and_one_address_moves_all() -> None:
    """A message of Alertmanager is read where no path of this project leads anywhere."""
    links: list[str] = [rule["annotations"]["runbook_url"] for rule in RULES]
    bases = {link.removesuffix(f"/runbooks/{link.rpartition('/')[2]}") for link in links}
    assert len(bases) == 1 and next(iter(bases)).startswith("https://")
    moved = linked(FILE.read_text(), "https://wiki.example.com/br/")
    assert moved.count("runbook_url: https://wiki.example.com/br/runbooks/") == len(RULES)
    assert yaml.safe_load(linked(moved, next(iter(bases)))) == yaml.safe_load(FILE.read_text())


def test_only_alerts_that_exist_are_silenced_by_others() -> None:
    names = {rule["alert"] for rule in RULES}
    config = yaml.safe_load((ROOT / "deploy" / "alertmanager" / "alertmanager.yml").read_text())
    for rule in config["inhibit_rules"]:
        for matcher in (*rule["source_matchers"], *rule["target_matchers"]):
            assert set(re.findall(r"Blockrelay\w+", matcher)) <= names
