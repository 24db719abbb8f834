"""What the documents say about the project is true: sizes, links, files, commands, errors, figures."""

import re
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from blockrelay import errors
from blockrelay_gateway.http.errors import status_of
from blockrelay_launcher.cli.main import app
from blockrelay_launcher.up_options.topology import read_topology
from tests.support.documents import ACTIVATION, COMMANDS, DOCUMENTS, activated, anchors, blocks, outside_blocks
from tests.support.project import ROOT

#: Pages of docs/ beside runbooks and procedures.
MOST_PAGES = 40
LANGUAGES = (*COMMANDS, "text", "json", "yaml")


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= 8000


def test_pages_are_few() -> None:
    """Runbooks and procedures are not counted: there is one for each alert and each task."""
    assert len(list((ROOT / "docs").glob("*.md"))) <= MOST_PAGES


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_a_page_begins_with_whom_it_is_for(page: Path) -> None:
    text = re.sub(r"\A<!--.*?-->\n+", "", page.read_text())
    title, paragraph = text.split("\n\n", 2)[:2]
    sentence = re.split(r"[.:](?:\s|$)", paragraph)[0]
    assert title.startswith("# ") and sentence.startswith("For "), page.name
    assert len(sentence.split()) <= 20, f"{page.name}: one plain sentence"


def test_the_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    section = (ROOT / "README.md").read_text().split("## Figures")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    assert len(rows) > 3
    measured = (ROOT / "docs" / "benchmarks.md").read_text()
    assert not [row for row in rows if row not in measured], "copy them from docs/benchmarks.md"


def test_every_link_leads_somewhere() -> None:
    for page in DOCUMENTS:
        for link in re.findall(r"\]\(([^)\s]+)\)", outside_blocks(page)):
            path, _, anchor = link.partition("#")
            if "://" in link or link.startswith("mailto:"):
                continue
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_every_page_is_in_the_navigation_and_listed_at_the_front() -> None:
    navigation, front = (ROOT / "mkdocs.yml").read_text(), (ROOT / "docs" / "index.md").read_text()
    readme = (ROOT / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f"- {page.name}\n" in navigation, page
        if page.name != "index.md":
            assert f"({page.name})" in front and f"(docs/{page.name})" in readme, page


def test_every_file_that_a_document_names_exists() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    files = [f"/{name}" for name in listed.split("\0")]
    for page in DOCUMENTS:
        if page.name in (
            "CHANGELOG.md",
            "architecture.md",
            "modules.md",
            "coming-from.md",
        ):  # of older releases; with tests of their own
            continue
        for name in re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|lua|md|h|cpp|acl|toml|yaml))`", page.read_text()):
            assert any(file.endswith(f"/{name}") for file in files), f"{page.name} names {name}"


def test_every_command_is_explained() -> None:
    operations = (ROOT / "docs" / "operations.md").read_text()
    for name in getattr(get_command(app), "commands", {}):
        assert re.search(rf"`blockrelay {name}|, `{name}[ `]", operations), name


def test_our_command_is_found_where_a_document_has_it_typed() -> None:
    """The environment of a checkout is not on the path of a new shell."""
    bare = re.compile(r"(?:^|[|&;(])\s*blockrelay\s", re.M)
    found = [
        block for page in DOCUMENTS for block in blocks(page) if block.language == "sh" and bare.search(block.text)
    ]
    assert found
    told = [block for block in found if ACTIVATION in block.text or activated(block.page, block.line)]
    assert not [str(block) for block in found if block not in told]
    readme = (ROOT / "README.md").read_text()
    before = readme[: readme.index(ACTIVATION)]
    assert not re.findall(r"(?<![/\w.])blockrelay \w+", before), "typed as it stands"


def test_every_target_of_the_makefile_that_a_document_names_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in DOCUMENTS:
        assert not set(re.findall(r"`make ([\w-]+)", page.read_text())) - targets, page.name


def test_every_error_that_clients_see_is_listed_with_its_status() -> None:
    rows = re.findall(r"^\| (\d{3}) \| ([^|]+)", (ROOT / "docs" / "api.md").read_text(), re.M)
    listed = {(int(status), name) for status, names in rows for name in re.findall(r"`(\w+)`", names)}
    for status, name in listed:
        limited = {"limit": "", "scope": "client" if status == 429 else "cell"} if name == "LimitExceeded" else {}
        assert status_of(getattr(errors, name)("", **limited)) == status, name
    text = (ROOT / "docs" / "api.md").read_text()
    inside = {
        "BlockrelayError",
        "UsageError",
        "RequestError",
        "WireError",
        "OutOfPages",
        "IllegalTransition",
        "DeviceFailed",
        "DeviceLost",
        "NoDeviceMemory",
        "GrammarEnded",
    }  # roots, and what never leaves a service
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.BlockrelayError) and name not in inside:
            assert f"`{name}`" in text, name


def test_every_block_says_its_language() -> None:
    for page in DOCUMENTS:
        for block in blocks(page):
            assert block.language in LANGUAGES, f"{block}: one of {', '.join(LANGUAGES)}"
        assert page.read_text().count("\n```") == 2 * len(blocks(page)), page


def test_a_topology_of_the_documents_is_one(tmp_path: Path) -> None:
    found = [block for page in DOCUMENTS for block in blocks(page) if block.language == "yaml"]
    for block in found:
        (tmp_path / "topology.yaml").write_text(block.text)
        assert len(read_topology(tmp_path / "topology.yaml").hosts) == 2, block
    assert found
