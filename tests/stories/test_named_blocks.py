"""A block that overflows: the error names it, with what ran well before it, by every way to ask."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from tests.support.models.planted_overflow import OVERFLOWING, overflowing_model
from tests.support.systems.up_process import UpProcess, running_up

#: In the second of two stages.
BLOCK = 4
BEFORE = ["block_1", "block_2", "block_3"]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    model = overflowing_model(tmp_path_factory.mktemp("model"), "w8a8", block=BLOCK).root
    with running_up(model, "--stages", "2") as running:
        yield running
        assert running.stop() == 0


def step(session: str, *tokens: int) -> dict[str, Any]:
    return {"session_id": session, "step": 1, "input_tensors": {"input_ids": [[*tokens]]}}


def check(body: dict[str, Any], session: str | None) -> None:
    """Field by field what the pipeline server's documents say of an error."""
    assert (body["status"], body["session_id"], body["failed_block"]) == ("error", session, f"block_{BLOCK}")
    assert body["message"].startswith(
        f"Pipeline failed at block_{BLOCK}: a row became NaN or infinite in block_{BLOCK}"
    )
    assert body["successful_blocks"] == BEFORE
    (failed,) = body["failed_blocks"]
    assert (failed["block_id"], failed["worker"]) == (f"block_{BLOCK}", "CPU")
    assert failed["error"] == f"a row became NaN or infinite in block_{BLOCK}" and failed["execution_time"] > 0


def test_by_http(up: UpProcess) -> None:
    answer = httpx.post(f"{up.url}/v1/infer", json=step("bad", 5, 7, OVERFLOWING), timeout=60)
    assert answer.status_code == 500
    check(answer.json(), "bad")
    good = httpx.post(f"{up.url}/v1/infer", json=step("good", 5, 6, 7), timeout=60).json()
    assert good["status"] == "success" and list(good["execution_times"]) == [*BEFORE, "block_4", "block_5"]


def test_by_websocket(up: UpProcess) -> None:
    with connect(up.url.replace("http", "ws") + "/ws") as socket:
        socket.send(json.dumps(step("bad2", OVERFLOWING)))
        check(json.loads(socket.recv(timeout=60)), "bad2")
