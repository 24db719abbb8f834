"""The file of API keys of a gateway that runs, changed as a kubelet changes what a pod shows: the process stays."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from blockrelay.auth.api_keys import hash_of
from blockrelay.settings import GatewaySettings, environment_for
from blockrelay_gateway.policy import KEY_FILE_POLL_S
from blockrelay_launcher.supervisor.ports import kept_ports
from tests.support.logs import entries
from tests.support.swapped_folder import SwappedFolder
from tests.support.waiting import wait_until

NAME = "keys.json"


def keys(*names: str, **limits: Any) -> str:
    """A file in which the key of each tenant is its name behind `br-`; the first one has the limits."""
    first = {"name": names[0], "sha256": hash_of(f"br-{names[0]}"), **limits}
    return json.dumps({"keys": [first, *({"name": name, "sha256": hash_of(f"br-{name}")} for name in names[1:])]})


@pytest.fixture
def shown(tmp_path: Path) -> SwappedFolder:
    return SwappedFolder(tmp_path / "keys", {NAME: keys("ada")})


class GatewayProcess:
    """`python -m blockrelay_gateway`, watched."""

    def __init__(self, settings: GatewaySettings, port: int, api_keys: Path, log: Path) -> None:
        env = environment_for(
            model=settings.model, redis_url=settings.redis_url, cell=settings.cell, port=port, api_keys=api_keys
        )
        self.url, self.log = f"http://127.0.0.1:{port}", log
        with log.open("wb") as file:
            command = [sys.executable, "-m", "blockrelay_gateway"]
            self.process = subprocess.Popen(command, env=env, stdout=file, stderr=file)
        wait_until(self._listens, "the gateway listens")

    def _listens(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return httpx.get(f"{self.url}/livez").status_code == 200
        except httpx.TransportError:
            return False

    def status(self, name: str) -> int:
        return httpx.get(f"{self.url}/v1/models", headers={"authorization": f"Bearer br-{name}"}).status_code

    def ask(self, name: str) -> int:
        body = {"prompt": "x", "max_tokens": 5, "background": True}
        headers = {"authorization": f"Bearer br-{name}"}
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=headers).status_code

    def metric(self, name: str) -> float:
        """A value from the scrape, which needs no key and so does not make the gateway read the file."""
        (line,) = re.findall(rf"^{name}{{.*}} (\S+)$", httpx.get(f"{self.url}/metrics").text, re.MULTILINE)
        return float(line)

    def said(self, event: str) -> list[dict[str, Any]]:
        return [entry["data"] for entry in entries(self.log, event)]


@pytest.fixture
def gateway(settings: GatewaySettings, shown: SwappedFolder, tmp_path: Path) -> Iterator[GatewayProcess]:
    with kept_ports("127.0.0.1", 0, 1) as (port,):
        found = GatewayProcess(settings, port, shown / NAME, tmp_path / "log")
        try:
            yield found
            assert found.process.poll() is None, "it is the process that was started"
        finally:
            found.process.send_signal(signal.SIGTERM)
            found.process.wait(30)


@pytest.mark.thorough
def test_a_running_gateway_takes_every_change_of_its_keys(gateway: GatewayProcess, shown: SwappedFolder) -> None:
    assert KEY_FILE_POLL_S < 5, "what operators are promised"
    assert (gateway.status("ada"), gateway.status("bob")) == (200, 401)
    assert gateway.metric("blockrelay_gateway_api_keys") == 1
    read_at = gateway.metric("blockrelay_gateway_api_keys_loaded_timestamp_seconds")

    shown.swap({NAME: keys("ada", "bob")})
    wait_until(lambda: gateway.metric("blockrelay_gateway_api_keys") == 2, "it is read though nobody asks")
    assert [line["keys"] for line in gateway.said("API_KEYS_READ")] == [2]
    assert gateway.metric("blockrelay_gateway_api_keys_loaded_timestamp_seconds") > read_at
    assert (gateway.status("ada"), gateway.status("bob")) == (200, 200)
    shown.swap({NAME: keys("ada", "bob", operator=True)})
    wait_until(lambda: 'tenant="bob"' in tenants(gateway), "the series of a new tenant begin")

    shown.swap({NAME: keys("bob")})
    assert (gateway.status("ada"), gateway.status("bob")) == (401, 200)

    assert gateway.ask("bob") == 202
    shown.swap({NAME: keys("bob", tokens_per_minute=3)})
    assert gateway.ask("bob") in (400, 429), "the new limit holds"

    for broken in ("", keys("bob", "eve")[:-20], '{"keys": [{"name": "eve"}]}'):
        shown.swap({NAME: broken})
        wait_until(lambda: gateway.metric("blockrelay_gateway_api_keys_unreadable") == 1, "that is told")
        assert (gateway.status("bob"), gateway.status("eve")) == (200, 401)
        shown.swap({NAME: keys("bob")})
        wait_until(lambda: gateway.metric("blockrelay_gateway_api_keys_unreadable") == 0, "it is mended")
    said = gateway.said("API_KEYS_UNREADABLE")
    assert len(said) == 3 and all("stay in force" in line["advice"] and line["keys"] == 1 for line in said)

    (shown / NAME).unlink()
    wait_until(lambda: len(gateway.said("API_KEYS_UNREADABLE")) == 4, "it is gone for a moment")
    assert gateway.status("bob") == 200
    (shown / NAME).symlink_to(f"..data/{NAME}")
    wait_until(lambda: gateway.metric("blockrelay_gateway_api_keys_unreadable") == 0, "it is back")
    assert not {"br-ada", "br-bob", "br-eve", hash_of("br-bob")} & set(re.split(r"[^\w-]", gateway.log.read_text()))


def tenants(gateway: GatewayProcess) -> str:
    return httpx.get(f"{gateway.url}/metrics/tenants", headers={"authorization": "Bearer br-ada"}).text
