"""The pipeline server's own requests, as its documents print them, by plain WebSocket client and by curl."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.sync.client import connect

from blockrelay.protocol.tensors import decode_tensor
from tests.support.models.tiny_model import BLOCKS
from tests.support.systems.failing_gpus import failing_gpus
from tests.support.systems.up_process import UpProcess, running_up

#: Word for word, but for the base64 text, of which the documents print only dots: [1, 15, 7, 9].
WHOLE = """{"session_id": "chat_001", "step": 1,
 "input_tensors": {
   "input_ids":      {"_tensor_": true, "dtype": "int64", "shape": [1, 4], "data_b64": "AQAAAAAAAAAPAAAAAAAAAAcAAAAAAAAACQAAAAAAAAA="},
   "attention_mask": {"_tensor_": true, "data": [1, 1, 1, 1]},
   "position_ids":   {"_tensor_": true, "data": [0, 1, 2, 3]}}}"""  # noqa: E501
BARE = '{"session_id": "%s", "step": %d, "input_tensors": {"input_ids": [1, 2, 3]}}'
#: The shape with which the blocks themselves are tested: batch 5, seq 10.
FIVE = json.dumps(
    {
        "session_id": "five",
        "step": 1,
        "logits": "all",
        "input_tensors": {
            "input_ids": [[10 * row + column + 1 for column in range(10)] for row in range(5)],
            "attention_mask": [[1] * 10] * 5,
            "position_ids": [list(range(10))] * 5,
        },
    }
)


@pytest.fixture(scope="module")
def up(tiny_model: Path) -> Iterator[UpProcess]:
    with running_up(tiny_model, "--stages", "2") as running:
        with failing_gpus(running, tiny_model, 1, after=2):
            yield running
        assert running.stop() == 0


def curl(up: UpProcess, body: str, *options: str) -> dict[str, Any]:
    argv = ["curl", "-s", "-S", *options, "-X", "POST", f"{up.url}/v1/infer", "-d", body]
    return json.loads(subprocess.run(argv, capture_output=True, check=True, timeout=60).stdout)


def logits(answer: dict[str, Any]) -> Any:
    return decode_tensor(answer["outputs"]["logits"], param="logits", max_elements=1 << 20)


def check(answer: dict[str, Any], session: str, shape: tuple[int, ...]) -> None:
    """What the documents say of a success."""
    assert answer["status"] == "success" and answer["message"] == "Pipeline completed successfully", answer
    assert (answer["session_id"], answer["step"]) == (session, 1)
    assert logits(answer).shape == shape and answer["outputs"]["logits"]["dtype"] == "float16"
    assert list(answer["execution_times"]) == [f"block_{n}" for n in range(1, BLOCKS + 1)]
    stats = answer["execution_stats"]
    assert stats["gpu_blocks_executed"] + stats["cpu_blocks_executed"] == BLOCKS
    assert stats["total_fallbacks"] == len(answer["fallback_events"]) >= stats["successful_fallbacks"]
    for event in answer["fallback_events"]:
        assert (event["from"], event["to"], event["success"]) == ("GPU", "CPU", True)
    assert answer["total_pipeline_time"] > 0


def test_by_curl(up: UpProcess) -> None:
    whole = curl(up, WHOLE)
    check(whole, "chat_001", (1, 1, 512))
    check(curl(up, BARE % ("bare", 1), "-H", "Content-Type: application/json"), "bare", (1, 1, 512))
    again = curl(up, WHOLE)
    assert again["outputs"] == whole["outputs"]
    wrong = curl(up, BARE % ("chat_001", 5))
    assert wrong["status"] == "error" and "expects step 2" in wrong["message"] and wrong["failed_blocks"] == []


@pytest.mark.parametrize("path", ["", "/ws"], ids=["as the clients of the pipeline server do", "by a path"])
def test_by_a_plain_websocket_client(up: UpProcess, path: str) -> None:
    one, five = f"one:{path[1:]}", f"five:{path[1:]}"
    with connect(up.url.replace("http", "ws") + path) as socket:
        socket.send(WHOLE.replace("chat_001", one))
        socket.send(FIVE.replace('"five"', json.dumps(five)))  # beside it
        answers = {answer["session_id"]: answer for answer in (json.loads(socket.recv(timeout=60)) for _ in range(2))}
        check(answers[one], one, (1, 1, 512))
        check(answers[five], five, (5, 10, 512))
        socket.send(BARE % (one, 5))
        assert "expects step 2" in json.loads(socket.recv(timeout=60))["message"]


def test_a_batch_has_the_bits_of_its_rows_alone(up: UpProcess) -> None:
    batch = logits(curl(up, FIVE.replace('"five"', '"together"')))
    for row in range(5):
        alone = json.loads(FIVE)
        alone["session_id"] = f"alone-{row}"
        alone["input_tensors"] = {name: [rows[row]] for name, rows in alone["input_tensors"].items()}
        assert logits(curl(up, json.dumps(alone))).tobytes() == batch[row : row + 1].tobytes()
    two = {"session_id": "together", "step": 2, "input_tensors": {"input_ids": [[7]] * 5}}
    assert np.isfinite(logits(curl(up, json.dumps(two)))).all()
