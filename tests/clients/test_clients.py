"""Real clients, each in an environment of its own, against a whole system: what `cases.toml` says is so, line by line.

`make test-clients` installs them. A case that fails where it has worked is a defect; one that works where it has failed
is made "works" in the table, so that it stays so.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from blockrelay.settings import BUNDLED_MODEL
from tests.clients import by_curl
from tests.clients.table import Client, clients
from tests.support.project import ROOT
from tests.support.systems.up_process import UpProcess, running_up

pytestmark = pytest.mark.clients

ENVIRONMENTS = ROOT / ".venv-clients"
#: Workers slow enough for keep-alives between tokens: no client may stumble over them.
SLOW, KEEP_ALIVE_S = "0.2", "0.001"


@pytest.fixture(scope="module")
def up() -> Iterator[UpProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOCKRELAY_KEEP_ALIVE_S", KEEP_ALIVE_S)
        patch.setenv("BLOCKRELAY_INJECT_SPEED", SLOW)
        with running_up(BUNDLED_MODEL, "--cors-origins", "http://friendly.example") as process:
            yield process


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's, as benchmark tools load one."""
    folder = tmp_path_factory.mktemp("tokenizer")
    shutil.copy(BUNDLED_MODEL / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def command_of(client: Client) -> list[str]:
    """Runs its cases; the environment is there."""
    language, _, name = client.by.partition("/")
    if language == "node" and shutil.which("npm") is None:
        pytest.skip(f"NOT TESTED: {client.title} needs npm")
    environment = ENVIRONMENTS / f"{language}-{client.environment}"
    assert environment.is_dir(), "make test-clients installs them"
    if language == "python":
        return [str(environment / "bin" / "python"), "-m", f"tests.clients.python.{name}_cases"]
    for script in ("harness.mjs", f"{name}_cases.mjs"):  # Node looks for packages beside the script
        shutil.copy(Path(__file__).with_name("node") / script, environment)
    return ["node", str(environment / f"{name}_cases.mjs")]


def outcomes(client: Client, up: UpProcess, tokenizer: Path) -> dict[str, str]:
    """What became of every case."""
    model = "storyteller"
    if client.by == "curl":
        return {name: by_curl.outcome(row, up.url, model) for name, row in client.cases.items()}
    done = subprocess.run(
        [*command_of(client), up.url, model, str(tokenizer)],
        cwd=ROOT,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"},
        input=json.dumps(client.cases),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=900,
    )
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    if not client.by.endswith(f"/{client.environment}"):  # it runs some of another's cases
        found = {name: found[name] for name in client.cases}
    return found


@pytest.mark.parametrize(("asked", "keep_alive"), [({}, "\n\n\n"), ({"event_ids": True}, "\n\n: keep-alive\n")])
def test_streams_have_keep_alives_in_both_forms(up: UpProcess, asked: dict[str, bool], keep_alive: str) -> None:
    """So that every client below has read some."""
    body = {"prompt": "Once upon a time", "max_tokens": 60, "stream": True, "stream_options": asked}
    text = httpx.post(f"{up.url}/v1/completions", json=body, timeout=60).text
    assert keep_alive in text and text.endswith("data: [DONE]\n\n")


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("client", clients(), ids=[client.name for client in clients()])
def test_what_the_table_says_of_a_client_is_so(client: Client, up: UpProcess, tokenizer: Path) -> None:
    assert outcomes(client, up, tokenizer) == {name: row["is"] for name, row in client.cases.items()}
