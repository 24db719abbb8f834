"""The invariants have one list, in docs/protocol.md; the model checks them and the scripts say which they keep."""

import re

from tests.support.project import ROOT

LISTED = set(re.findall(r"^\| (I\d+) \|", (ROOT / "docs" / "protocol.md").read_text(), re.M))
#: Sums that need real records: checked on the real scripts, in tests/properties.
ELSEWHERE = {"I6"}
#: Kept by a gateway, which reads.
READERS = {"I8"}


def test_the_model_checks_every_invariant() -> None:
    checked = set(re.findall(r"\"(I\d+):", (ROOT / "tests/protocol_model/invariants.py").read_text()))
    assert checked == LISTED - ELSEWHERE


def test_every_invariant_is_kept_by_a_script_that_says_so() -> None:
    lines = [
        line
        for script in (ROOT / "shared/blockrelay/protocol/transitions").rglob("*.lua")
        for line in script.read_text().splitlines()
        if line.startswith("--")
    ]
    assert set(re.findall(r"\bI\d+\b", "\n".join(lines))) == LISTED - READERS
