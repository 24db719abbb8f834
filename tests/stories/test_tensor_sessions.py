"""Tensor steps against real workers: a session's logits are those of the same tokens in one piece, bit for bit."""

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from websockets.sync.client import connect

from blockrelay.protocol.tensors import decode_tensor
from tests.support.models.tiny_model import BLOCKS, write_tiny_model
from tests.support.systems.up_process import running_up

TOKENS = [1, 40, 300, 7, 88, 211, 5, 6, 17, 401]


def step(session: str, number: int, tokens: list[int], start: int, **more: Any) -> dict[str, Any]:
    def tensor(values: list[int]) -> dict[str, Any]:
        raw = base64.b64encode(np.array(values, dtype="<i8").tobytes()).decode()
        return {"_tensor_": True, "dtype": "int64", "shape": [1, len(values)], "data_b64": raw}

    inputs = {
        "input_ids": tensor(tokens),
        "attention_mask": tensor([1] * (start + len(tokens))),
        "position_ids": tensor(list(range(start, start + len(tokens)))),
    }
    return {"session_id": session, "step": number, "input_tensors": inputs, **more}


def logits(answer: dict[str, Any]) -> Any:
    assert answer["status"] == "success", answer
    return decode_tensor(answer["outputs"]["logits"], param="logits", max_elements=1 << 20)[0]


def test_a_session_in_steps_has_the_logits_of_one_prompt(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path)
    with running_up(model, "--stages", "2") as up, httpx.Client(base_url=up.url, timeout=60) as http:

        def run(body: dict[str, Any]) -> dict[str, Any]:
            return http.post("/v1/infer", json=body).json()

        whole = run(step("whole", 1, TOKENS, 0, logits="all"))
        assert sorted(whole["execution_times"]) == [f"block_{i}" for i in range(1, BLOCKS + 1)]
        pieces = [
            logits(run(step("steps", 1, TOKENS[:3], 0, logits="all"))),
            logits(run(step("steps", 2, TOKENS[3:4], 3))),
            logits(run(step("steps", 3, TOKENS[4:], 4, logits="all"))),
        ]
        assert np.concatenate(pieces).tobytes() == logits(whole).tobytes()
        assert logits(run(step("steps", 3, TOKENS[4:], 4, logits="all"))).tobytes() == pieces[2].tobytes()

        greedy = {"prompt": TOKENS, "max_tokens": 1, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
        (choice,) = http.post("/v1/completions", json=greedy).json()["choices"]
        assert choice["token_ids"] == [int(logits(whole)[-1].argmax())]

        with connect(up.url.replace("http", "ws") + "/v1/infer/ws") as socket:
            socket.send(json.dumps(step("steps", 4, choice["token_ids"], len(TOKENS))))
            assert logits(json.loads(socket.recv(timeout=30))).shape == (1, 512)
        assert up.stop() == 0
