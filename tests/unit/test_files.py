"""What every Python file of the project keeps to."""

import re
from collections import Counter

from tests.support.project import ROOT


def test_no_python_file_is_longer_than_400_lines() -> None:
    files = [f for part in ("shared", "services", "tests", "bench", "docs") for f in (ROOT / part).rglob("*.py")]
    assert not [f for f in files if len(f.read_text().splitlines()) > 400]


def test_no_package_has_more_than_twelve_modules() -> None:
    """A reader sees a package in one look; `__init__.py` is none of its modules."""
    modules = Counter(file.parent for part in ("shared", "services") for file in (ROOT / part).rglob("*.py"))
    packages = {folder: count - (folder / "__init__.py").exists() for folder, count in modules.items()}
    assert not {str(folder): count for folder, count in packages.items() if count > 12}


def test_no_test_module_imports_another() -> None:
    """What tests share lies in folders for it: a test that is moved or deselected takes nothing with it."""
    imported = re.compile(r"^(?:from|import) (tests\.(?!(?:support|protocol_model|clients)\b)[\w.]+)", re.M)
    for file in (ROOT / "tests").rglob("*.py"):
        assert not imported.findall(file.read_text()), file
