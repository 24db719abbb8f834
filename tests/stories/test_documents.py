"""Every command and program in the documents works: each page's blocks run in order against one system."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockrelay.settings import BUNDLED_MODEL
from tests.support.documents import COMMANDS, DOCUMENTS, Block, activated, blocks
from tests.support.systems.up_process import running_up

#: The gateways of the documents, in the order of their ports.
GATEWAYS = ("127.0.0.1:8000", "127.0.0.1:8001")


def runnable(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language in COMMANDS and not block.not_run]


PAGES = [page for page in DOCUMENTS if runnable(page)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The data folder of a running `up --gateways 2`."""
    folder = tmp_path_factory.mktemp("up") / "data"
    with running_up(BUNDLED_MODEL, "--gateways", "2", data=folder):
        yield folder


def test_there_is_something_to_run() -> None:
    assert {"README.md", "api.md", "getting-started.md", "admission.md", "operations.md"} <= {p.name for p in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page: Path, data: Path, tmp_path: Path) -> None:
    """In a folder of their own, where `.data` is that of the system and `.venv` the environment, whose programs are on
    the path from where the page says how. Whatever HTTP refuses fails."""
    (tmp_path / ".data").symlink_to(data)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / ".curlrc").write_text("silent\nshow-error\nfail-with-body\n")
    tools = Path(sys.executable).parent
    others = ":".join(one for one in os.environ["PATH"].split(":") if one and Path(one).resolve() != tools.resolve())
    env = {**os.environ, "HOME": str(tmp_path)}
    urls = json.loads((data / "up.json").read_text())["urls"]
    for block in runnable(page):
        text = block.text
        for said, url in zip(GATEWAYS, urls, strict=True):
            text = text.replace(said, url.removeprefix("http://"))
        env["PATH"] = f"{tools}:{others}" if activated(page, block.line) else others
        argv = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
        done = subprocess.run([*argv, text], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        assert done.stdout, f"{block} prints nothing"
