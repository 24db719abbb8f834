"""The README's picture of the project is true: keys, folders, commands, settings."""

import re

from typer.main import get_command

from blockrelay.protocol import keys
from blockrelay_launcher.cli.main import app
from tests.support.project import README, ROOT


def test_the_key_table_is_that_of_the_code() -> None:
    assert "\n".join(keys.table()) in README


def test_every_folder_of_the_tree_exists_and_every_service_is_in_it() -> None:
    tree = README.split("## How it is laid out")[1].split("```")[1]
    shown = {line.split()[0] for line in tree.splitlines() if line.strip()}
    for name in shown:
        assert any((base / name).is_dir() for base in (ROOT, *ROOT.glob("s*/**/blockrelay*"))), name
    for folder in (ROOT / "services").iterdir():
        assert f"services/{folder.name}/" in shown


def test_every_command_is_explained() -> None:
    commands = getattr(get_command(app), "commands", {})
    for name in commands:
        assert re.search(rf"blockrelay {name}|`{name} ", README), name


def test_no_python_file_is_longer_than_400_lines() -> None:
    files = [f for part in ("shared", "services", "tests", "bench", "model") for f in (ROOT / part).rglob("*.py")]
    assert not [f for f in files if len(f.read_text().splitlines()) > 400]


def test_every_link_within_it_leads_to_a_heading() -> None:
    headings = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", README, re.M)
    }
    assert not set(re.findall(r"\]\(#([^)]*)\)", README)) - headings


def test_no_test_module_imports_another() -> None:
    """What tests share lies in tests/support: a test that is moved or deselected takes nothing with it."""
    imported = re.compile(r"^(?:from|import) (tests\.(?!(?:support|protocol_model)\b)[\w.]+)", re.M)
    for file in (ROOT / "tests").rglob("*.py"):
        assert not imported.findall(file.read_text()), file
