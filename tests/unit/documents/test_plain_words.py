"""Docstrings and comments keep to docs/style.md, as far as a program can see."""

import re
from pathlib import Path

import pytest

from docs.generate.pages import WHOLLY_GENERATED
from tests.support.documents import DOCUMENTS
from tests.support.plain_words import OPENINGS, PHRASES, PRODUCT, ROOT, Finding, files_of, findings


def test_no_file_has_a_refused_word() -> None:
    wrong = {str(file.relative_to(ROOT)): found for file in files_of(PRODUCT) if (found := findings(file.read_text()))}
    assert not wrong, "docs/style.md says how"


@pytest.mark.parametrize("opening", OPENINGS)
def test_a_docstring_must_not_begin_so(opening: str) -> None:
    source = f'"""{opening} SIZES."""\n\n\nclass Bucket:\n    size: int\n    """{opening} it."""\n'
    assert {finding.line for finding in findings(source)} == {1, 6}
    assert not findings(f'"""The {opening.lower()}fer."""\n')


@pytest.mark.parametrize("phrase", PHRASES)
def test_neither_docstrings_nor_comments_have_it(phrase: str) -> None:
    source = f'def run() -> None:\n    """Runs.\n\n    {phrase.capitalize()} asks.\n    """\n    pass  # {phrase}\n'
    assert {finding.line for finding in findings(source)} == {4, 6}
    assert not findings(f'TEXT = "{phrase}"\n'), "texts for users are read by people"


def test_a_finding_names_line_and_word() -> None:
    assert findings("x = 1\n# done anew\n") == [Finding(2, "'anew'")]


#: The page about words names them; a changelog is not rewritten; texts from the code are generated.
EXEMPT = ("CHANGELOG.md", "style.md", "modules.md", *WHOLLY_GENERATED)
GENERATED_PART = re.compile(r"<!-- (\w+): made by .*?<!-- end of \1 -->", re.S)


@pytest.mark.parametrize("page", [page for page in DOCUMENTS if page.name not in EXEMPT], ids=lambda page: page.stem)
def test_no_page_written_by_hand_has_a_refused_phrase(page: Path) -> None:
    text = GENERATED_PART.sub("", page.read_text())
    assert not re.findall(rf"\b(?:{'|'.join(PHRASES)})\b", text, re.I), f"{page.name}: docs/style.md says how"
