"""The generated pages in docs/ are those that the code gives."""

import pytest

from blockrelay.settings import GatewaySettings, SchedulerSettings, Settings, WorkerSettings
from docs.generate.pages import COMMAND, FOLDER, pages


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    """Name -> text of every page."""
    return pages()


def test_no_generated_page_is_stale(generated: dict[str, str]) -> None:
    for name, text in generated.items():
        assert (FOLDER / name).read_text() == text, f"docs/{name} is stale: {COMMAND} refreshes it"


def test_every_effect_with_a_failure_point_is_explained(generated: dict[str, str]) -> None:
    text = generated["states.md"]
    lines = [line for line in text.splitlines() if "a call of the script" in line]
    assert lines and not [line for line in lines if "_" in line.split("a call of the script ")[1].split(" |")[0]]


@pytest.mark.parametrize("kind", [GatewaySettings, SchedulerSettings, WorkerSettings])
def test_every_setting_says_what_it_means(kind: type[Settings]) -> None:
    assert not [name for name, field in kind.model_fields.items() if not field.description]
