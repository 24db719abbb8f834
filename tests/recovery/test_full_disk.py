"""The disk under the control Redis is full: new requests are refused, accepted ones wait until there is room again."""

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from blockrelay_launcher.client.resuming import resuming_stream
from tests.support.systems.up_process import running_up
from tests.support.waiting import wait_until

BODY: dict[str, Any] = {
    "prompt": [1, 5, 9], "max_tokens": 450, "temperature": 0, "ignore_eos": True, "return_token_ids": True
}  # fmt: skip


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A disk of its own of eight megabytes."""
    with tempfile.TemporaryDirectory(prefix="br-disk-") as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", folder]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
            pytest.skip("needs the right to mount a small file system")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all the room there is."""
    ballast = disk / "ballast"
    with ballast.open("ab", buffering=0) as file:
        try:
            while file.write(b"x" * 4096) == 4096:
                pass
        except OSError:
            pass
    return ballast


@pytest.mark.faults
def test_a_full_disk_refuses_what_is_new_and_loses_nothing(tiny_model: Path, small_disk: Path) -> None:
    with running_up(tiny_model, "--stages", "2", data=small_disk / "d") as up:
        undisturbed = up.tokens(**BODY)
        seen: list[int] = []
        halfway, full = threading.Event(), threading.Event()

        def read() -> None:
            for event in resuming_stream([up.url], "/v1/completions", BODY, key="k"):
                seen.extend(event.data["choices"][0].get("token_ids") or [])
                if len(seen) > 100:
                    halfway.set()
                    full.wait(30)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        assert halfway.wait(30)
        ballast = fill(small_disk)
        full.set()

        def refused() -> bool:
            answer = httpx.post(f"{up.url}/v1/completions", json={**BODY, "background": True}, timeout=60)
            if answer.is_success:
                accepted.append(answer.json()["id"])
                fill_again = fill(small_disk)
                assert fill_again == ballast
                return False
            assert answer.status_code == 503 and "error" in json.loads(answer.content), answer.text
            assert int(answer.headers["retry-after"]) > 0
            return True

        accepted: list[str] = []
        wait_until(refused, "new requests are refused", timeout_s=60)
        ballast.unlink()
        reader.join(60)
        assert not reader.is_alive() and seen == undisturbed

        def completed(public: str) -> bool:
            answer = httpx.get(f"{up.url}/v1/requests/{public}", timeout=60)
            return answer.is_success and answer.json()["status"] == "completed"

        for public in accepted:
            wait_until(lambda p=public: completed(p), "what was accepted is completed")
            assert httpx.get(f"{up.url}/v1/requests/{public}").json()["token_ids"] == undisturbed
        assert httpx.post(f"{up.url}/v1/completions", json=BODY, timeout=60).is_success
        assert up.stop() == 0
