"""Systems that tests may break: every server and process belongs to the test alone."""

from pathlib import Path

import pytest

from tests.support.systems.fixtures import shared_folder as shared_folder
from tests.support.systems.fixtures import start_system as start_system
from tests.support.systems.system import Job, golden_tokens, make_jobs


@pytest.fixture(scope="session")
def long_jobs(tiny_model: Path) -> tuple[list[Job], dict[str, list[int]]]:
    """20 requests of 300 tokens and their golden tokens: long enough to be interrupted at any moment."""
    from blockrelay.block_folder.folder import open_block_folder

    jobs = make_jobs(20, seed=7, vocab=500, tokens=300)
    return jobs, golden_tokens(open_block_folder(tiny_model), jobs)
